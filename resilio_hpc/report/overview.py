"""One run at one moment, from its files: its state, its faults, its goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields, parse_object, printable
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.report.faults import RunFault, faults
from resilio_hpc.report.goodput import Goodput, goodput
from resilio_hpc.report.present import RunVerdict, facts_of, parse_verdict, present
from resilio_hpc.report.progress import RunProgress, progress
from resilio_hpc.report.status import Status, parse_status

LAST_WORDS_S = 3.0  # after the verdict, for the ledger's last lines
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """The newest committed checkpoint; ``time``: None when only its step is known.

    ``blocked_s``: how long training waited for its snapshot, in the slowest rank; None: not known.
    """

    step: int
    time: float | None
    blocked_s: float | None = None


@dataclass(frozen=True)
class Restore:
    """The last restore: ``step`` from ``source``, in which the slowest rank took ``seconds``."""

    step: int
    source: str
    seconds: float | None


@dataclass(frozen=True)
class Overview:
    """A run at one moment.

    ``state``: starting, running, stale (no news for long) or ended; ``verdict`` only when ended.
    """

    path: Path
    run_id: str
    created: float | None
    now: float
    state: str
    silent_s: float | None
    job: str
    jobs: int
    status: Status | None
    verdict: RunVerdict | None
    checkpoint: Checkpoint | None
    faults: tuple[RunFault, ...]
    goodput: Goodput
    events: tuple[Event, ...]
    since: float = 0.0
    out_of_use: tuple[OutOfUse, ...] = ()
    restore: Restore | None = None
    progress: RunProgress = field(default_factory=RunProgress)


class RunReader:
    """Reads a run directory again and again; of the ledger, only what is new."""

    def __init__(self, path: Path) -> None:
        """Raise UsageError where ``path`` is no run directory, or not this user's alone."""
        self.path = path = find_run(path)
        self.run_id, self.created = read_identity(path)
        self._ledger = LedgerReader(path / "ledger")
        self._events: list[Event] = []
        self._untold: list[Event] = []

    def new_events(self) -> list[Event]:
        """Return what the ledger has gained since the last call."""
        self._read()
        new, self._untold = self._untold, []
        return new

    def _read(self) -> None:
        new = self._ledger.read_new()
        if new:
            self._events = sorted([*self._events, *new], key=lambda event: event.time)
            self._untold += new

    def overview(self, now: float, since: float = 0.0) -> Overview:
        """Return the run now; verdicts and events before ``since`` are of an earlier job (Unix seconds)."""
        self._read()
        status = parse_status(trusted_files.read_object(self.path / "status.json"))
        verdict = parse_verdict(trusted_files.read_object(self.path / "verdict.json"))
        if verdict is not None and verdict.time < since:
            verdict = None
        if status is not None and status.time < since:
            status = None
        return build(self.path, (self.run_id, self.created), self._events, status, verdict, now, since)


def find_run(path: Path) -> Path:
    """Return the real path of a run directory.

    Raises UsageError where there is none, or it is not this user's alone.
    """
    name = printable(str(path), 500)
    try:
        found = path.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None
    if not found:
        what = "is not a directory" if path.exists() else "does not exist"
        raise UsageError(f"{name} {what}; give the run directory that resilio-launch names")
    try:
        return trusted_files.run_directory(path)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None


def read_identity(path: Path) -> tuple[str, float | None]:
    """Return (run id, Unix time of creation). Raises UsageError where ``path`` is no run directory."""
    name = printable(str(path), 500)
    try:
        content = trusted_files.read(path / "run.json")
    except FileNotFoundError:
        raise UsageError(f"{name} is not a run directory of resilio (no run.json)") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    f = Fields.of(parse_object(content))
    version = f.whole("version")
    if not f.text("run_id") or version is None:
        raise UsageError(f"{name} is not a run directory of resilio (run.json is damaged)")
    if version > FORMAT:
        raise UsageError(f"{name} was made by a newer resilio (format {version}): update this one")
    return printable(f.text("run_id"), 40), f.time("created")


def is_closed(overview: Overview) -> bool:
    """Return whether the job has a verdict, and the ledger its last events, or time enough for them. Pure."""
    if overview.state != "ended" or overview.verdict is None:
        return False
    ends = [event.kind for event in overview.events if event.kind in ("launch", "launch_ends")]
    return ends[-1:] == ["launch_ends"] or abs(overview.now - overview.verdict.time) > LAST_WORDS_S


def build(
    path: Path,
    identity: tuple[str, float | None],
    events: Sequence[Event],
    status: Status | None,
    verdict: RunVerdict | None,
    now: float,
    since: float = 0.0,
) -> Overview:
    """Return the overview from its parts. Pure."""
    facts = facts_of(events)
    found = present(facts, identity[1], status, verdict, now, since)
    status, verdict = found.status, found.verdict
    return Overview(
        path=path,
        run_id=identity[0],
        created=identity[1],
        now=now,
        state=found.state,
        silent_s=found.silent_s,
        job=found.job,
        jobs=found.jobs,
        status=status,
        verdict=verdict,
        checkpoint=_checkpoint(events, status, verdict),
        faults=tuple(faults(events)),
        goodput=goodput(events, status.time if status else None),
        events=tuple(events),
        since=since,
        out_of_use=out_of_use(events, facts.launched or 0.0),
        restore=_restore(events),
        progress=progress(events, status if found.state != "ended" else None, now),
    )


def _restore(events: Sequence[Event]) -> Restore | None:
    for event in reversed(events):
        f = Fields(event.fields)
        if event.kind == "first_step" and (step := f.whole("restored")) is not None and step >= 0:
            return Restore(step, f.text("source"), f.number("restore_s"))
    return None


def _checkpoint(events: Sequence[Event], status: Status | None, verdict: RunVerdict | None) -> Checkpoint | None:
    known = [
        (step, event.time, Fields(event.fields).number("blocked_s")) for event in events
        if event.kind == "committed" and (step := Fields(event.fields).whole("step")) is not None
    ]  # fmt: skip
    newest = known[-1] if known else None
    others = (status.committed if status else None, Fields(verdict.fields).whole("committed") if verdict else None)
    told = max((step for step in others if step is not None), default=-1)
    if newest is not None and newest[0] >= told:
        return Checkpoint(*newest)
    return Checkpoint(told, None) if told >= 0 else None


@dataclass(frozen=True)
class OutOfUse:
    """An evicted GPU of a node. ``index``: Slurm's, None where not known."""

    node: str
    device: str
    index: int | None
    check: str
    evidence: str
    time: float

    def __str__(self) -> str:
        which = self.device if self.index is None else f"GPU {self.index} ({self.device})"
        return f"{self.node}: {which}, {self.check}"


def out_of_use(events: Sequence[Event], since: float) -> tuple[OutOfUse, ...]:
    """Return those that were evicted since the job's launch at ``since`` (Unix seconds), each once."""
    found: dict[tuple[str, str], OutOfUse] = {}
    for event in events:
        f = Fields(event.fields)
        if event.kind != "device_evicted" or event.time < since or not f.data.get("acted", True):
            continue
        index = f.whole("index")
        one = OutOfUse(
            printable(f.text("node", "?"), 60), printable(f.text("device", "?"), 80),
            index if index is not None and index >= 0 else None, printable(f.text("check", "?"), 40),
            printable(f.text("evidence"), 200), event.time,
        )  # fmt: skip
        found.setdefault((one.node, f.text("entry") or one.device), one)
    return tuple(found.values())
