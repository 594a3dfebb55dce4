"""The first failing rank's error: who, how, when, and its traceback. Pure but for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.core.terminal import local_time, plain
from resilio_hpc.diagnose.causes.pattern_table import CauseClass
from resilio_hpc.events.failure_text import exit_words
from resilio_hpc.report.accounting.run_time import run_time
from resilio_hpc.report.chain.recoveries import recoveries
from resilio_hpc.report.chain.run_report import KINDS
from resilio_hpc.report.rank_logs import error_lines, log_directory, logs_of

VERSION = 1
LOG_LINES = 20
CLASSES = {
    CauseClass.USER_CODE: "an error of the program",
    CauseClass.LAUNCH_CONFIG: "a mistake in the command, or in what the job asks for",
    CauseClass.OOM_HOST: "too little memory on the node",
    CauseClass.OOM_GPU: "too little GPU memory",
    CauseClass.GPU_HARDWARE: "a fault of a GPU",
    CauseClass.NIC_NETWORK: "a fault of the network",
    CauseClass.STORAGE: "a fault of a file system",
    CauseClass.SOFTWARE_STACK: "software that does not fit together",
    CauseClass.SLURM: "Slurm's doing",
    CauseClass.DATA: "a bad piece of data",
}


@dataclass(frozen=True)
class FirstError:
    """A rank's failure. ``fields``: as in the ledger's ``rank_failed``; ``log_lines``: the end of its output."""

    time: float
    fields: dict[str, Any]
    log: Path | None
    log_lines: tuple[str, ...]

    @property
    def rank(self) -> int | None:
        """Return the rank."""
        return Fields(self.fields).whole("rank")


def read_first_error(run: Path, number: int | None = None) -> FirstError | None:
    """Return the error of the rank that failed first when ranks failed last; None where no rank has failed.

    ``number``: only of this round. Raises Untrusted.
    """
    event = first_failed(read_ledger(run / "ledger", KINDS), number)
    if event is None and number is None:
        verdict = Fields.of(trusted_files.read_object(run / "verdict.json"))
        fields = dict(verdict.inner("first_failure").data)
        event = Event(Fields(fields).time("time") or 0.0, "", "rank_failed", fields) if fields else None
    if event is None:
        return None
    f = Fields(event.fields)
    of_round = f.whole("round") if f.has("round") else None
    path: Path | None = None
    lines: list[bytes] = []
    if of_round is not None and (rank := f.whole("rank")) is not None:
        path, lines = error_lines(logs_of(log_directory(run), of_round), rank, LOG_LINES)
    return FirstError(event.time, dict(event.fields), path, tuple(line.decode(errors="replace") for line in lines))


def first_failed(events: Sequence[Event], number: int | None = None) -> Event | None:
    """Return the line of the rank that failed first in the newest fault that has one. Pure."""
    for one in reversed(recoveries(events, run_time(events), False)):
        if one.sign is not None and one.sign.kind == "rank_failed" and number in (None, one.fault.round):
            return one.sign
    return None


def class_of(name: str) -> CauseClass:
    """Return the class of that name in the ledger. Another version's is unknown."""
    try:
        return CauseClass(name)
    except ValueError:
        return CauseClass.UNKNOWN


def error_text(error: FirstError) -> Iterator[str]:
    """Return the lines for a person."""
    f = Fields(error.fields)
    of_round = f" in round {f.whole('round')}" if f.has("round") else ""
    local = f" (local rank {f.whole('local_rank')})" if f.has("local_rank") else ""
    yield f"rank {f.whole('rank')}{local} on {printable(f.text('node', '?'), 255)}{of_round}"
    place = f" at {printable(f.text('place'), 200)}" if f.text("place") else ""
    yield f"  time   {local_time(error.time)}.{int(error.time * 1000) % 1000:03d}"
    yield f"  end    {exit_words(f)}{place}"
    cause = class_of(f.text("class"))
    if cause is not CauseClass.UNKNOWN:
        yield f"  class  {cause.value}: {CLASSES[cause]}"
    elif f.data.get("echo") is True:
        yield "  class  it reads like an echo of another end, and no other is on record"
    traceback = f.text("traceback").strip("\n")
    message = f.text("message").strip()
    if message and message not in traceback:
        first, *more = message.splitlines()
        yield f"  error  {plain(first)}"
        yield from (f"         {plain(line)}" for line in more)
    yield from (f"  {plain(line)}" for line in traceback.splitlines())
    if error.log is not None:
        yield f"  log    {printable(str(error.log), 500)}"
    if not traceback and error.log_lines:
        yield from (f"    {plain(line.rpartition(chr(13))[2])}" for line in error.log_lines)


def error_object(run: Path, error: FirstError) -> dict[str, Any]:
    """Return the object of ``resilio logs --first-error --json``; unknown values are null."""
    f = Fields(error.fields)
    names = ("round", "node", "rank", "local_rank", "kind", "exit_code", "signal", "message", "traceback", "place")
    return {
        "v": VERSION, "run_dir": str(run), "time": error.time, **{name: f.data.get(name) for name in names},
        "class": f.text("class") or None, "echo": f.data.get("echo") is True,
        "log": str(error.log) if error.log is not None else None, "log_lines": list(error.log_lines),
    }  # fmt: skip
