"""A small run on this machine: two ranks, of which one kills itself; the time of its recovery from its own ledger."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, ok, warning
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.rundir import node_directories

MARGIN_S = 15.0
"""For the end of a launch that takes too long, beyond the limit."""
_END_S = 6.0
_SLOW_S = 10.0
_SOCKET_PATH_BYTES, _LONGEST_NAME = 107, 54  # unix(7); an agent's directory and socket
_OTHERS = ("PET_", "TORCHELASTIC_", "SLURM_", "RESILIO_")
"""Variables of a launch around this one."""


def recovery(view: DoctorView) -> DoctorFinding:
    """Launch the program, wait for its end, and read the ledger."""
    base = node_directories.local_base()
    view.mark(f"a launch in {base}")
    with _directory(base) as directory:
        limit = view.recovery_limit_s
        code = _launch(directory, view.environment, limit)
        events = read_ledger(directory / "run" / "ledger")
        if code is None:
            return failed(
                f"the launch has not ended within {limit:g} s; {_progress(events)}",
                "A launch hangs, or is very slow, on this machine.",
                "mend what failed above, or give it longer: --limit S",
            )
        return judge(events, code, _last_words(directory / "output"))


def judge(events: list[Event], code: int, said: str) -> DoctorFinding:
    """Return the finding for a launch that has ended. Pure."""
    recovered = [Fields(event.fields) for event in events if event.kind == "recovered"]
    took = recovered[0].number("recovery_s") if recovered else None
    if code != 0 or took is None:
        return failed(
            f"the launch ended with {code}, {_progress(events)}" + (f": {said}" if said else ""),
            "A rank that dies is not recovered on this machine.",
            "mend what failed above; the same by hand: resilio-launch --standalone --no-torch --nproc-per-node 2 "
            "-m resilio_hpc.doctor.loopback_program",
        )
    sources = [Fields(event.fields).text("source") for event in events if event.kind == "first_step"]
    seen = f"a killed rank was back in {took:.2f} s, with step {recovered[0].whole('restored')}"
    if sources[-1:] != ["memory"]:
        return warning(
            f"{seen}, not from memory",
            "No snapshot was kept in memory: ranks restore from the shared file system, or begin again.",
            "look at /dev/shm and the memory above",
        )
    if took > _SLOW_S:
        return warning(seen, "This machine is busy, or slow.", "look at what else runs here (top), and try again")
    return ok(seen)


def _launch(directory: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Run the launch; return its exit code, None where it took too long.

    It has a session of its own, so that Ctrl-C reaches it once, from here: a second signal kills it.
    """
    own = {name: value for name, value in environment.items() if not name.startswith(_OTHERS)}
    own[node_directories.VARIABLE] = str(directory if _takes_sockets(directory) else directory.parent)
    argv = [
        *bootstrap.command("cli.resilio_launch"), "--standalone", "--no-torch", "--nproc-per-node", "2",
        "--run-dir", str(directory / "run"), "-m", "resilio_hpc.doctor.loopback_program",
    ]  # fmt: skip
    with open(directory / "output", "wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=own, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _takes_sockets(directory: Path) -> bool:
    """Return whether paths below are short enough. What a killed launch leaves there is removed with the directory."""
    return len(os.fsencode(directory)) + _LONGEST_NAME <= _SOCKET_PATH_BYTES


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch: it stops by itself at the first signal, and kills everything at the second."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


@contextlib.contextmanager
def _directory(base: Path) -> Iterator[Path]:
    """Give a directory for the run, and remove it with what a killed launch leaves on this node."""
    from resilio_hpc.launch.rundir import run_directory

    directory = Path(tempfile.mkdtemp(prefix="resilio-doctor-", dir=base))
    try:
        yield directory
    finally:
        with contextlib.suppress(OSError, ResilioError):
            run = run_directory.read_run(directory / "run")
            node = os.uname().nodename.split(".")[0]
            for left in node_directories.found(run.run_id, node):
                if left is not None:
                    shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)


def _progress(events: list[Event]) -> str:
    kinds = [event.kind for event in events]
    for kind, words in (
        ("recovered", "after the recovery"),
        ("rank_failed", "before the killed rank was back"),
        ("ranks_started", "after its ranks were started"),
        ("agent_joined", "before its ranks were started"),
    ):
        if kind in kinds:
            return words
    return "before its agent was there"


def _last_words(output: Path) -> str:
    try:
        lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return " | ".join(lines[-3:])
