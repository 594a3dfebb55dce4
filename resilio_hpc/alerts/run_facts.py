"""What the alerts look at, read from a run directory once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.rundir import chain_order
from resilio_hpc.report.accounting.part_facts import PartFacts
from resilio_hpc.report.accounting.run_time import RunTime, run_time
from resilio_hpc.report.chain.run_report import KINDS as REPORT_KINDS
from resilio_hpc.report.faults import RunFault, faults
from resilio_hpc.report.overview import find_run, read_identity
from resilio_hpc.report.present import RunNow, facts_of, parse_verdict, present
from resilio_hpc.report.status import parse_status
from resilio_hpc.slurm.chain import chain

KINDS = REPORT_KINDS | frozenset({
    "successor", "successor_refused", "successor_cancelled", "requeued_instead", "chain_stopped", "end_time",
    "agent_joined", "node_returned", "tested", "stop_failed", "local_failed", "save_overdue", "save_resumed",
    "signal", "leaving", "warned", "stopping", "slow", "slow_over", "forgiven", "device_evicted",
})  # fmt: skip


@dataclass(frozen=True)
class StepSeen:
    """The furthest step that a check has seen, and when it saw that step first (Unix seconds)."""

    step: int
    time: float


@dataclass(frozen=True)
class ChainLimits:
    """What the launch and its user say of the chain. ``jobs``: at most, None where it is not known.

    ``newest``: the job that was submitted last, by the run or its user.
    """

    chained: bool = False
    jobs: int | None = None
    newest: str = ""
    stopped: bool = False
    max_restarts: int | None = None


@dataclass(frozen=True)
class AlertFacts:
    """A run at ``now``. ``until``: until when it is known to run (Unix seconds); ``seen``: of an earlier check.

    ``events``: by time, those of ``KINDS``.
    """

    path: Path
    run_id: str
    now: float
    until: float
    events: tuple[Event, ...]
    time: RunTime
    state: RunNow
    chain: ChainLimits
    faults: tuple[RunFault, ...]
    seen: StepSeen | None = None

    @property
    def part(self) -> PartFacts | None:
        """Return the newest part of the run."""
        return self.time.parts[-1].facts if self.time.parts else None

    @property
    def runs(self) -> bool:
        """Return whether a job of the run lives, as far as its files tell."""
        return self.state.state in ("starting", "running") and self.part is not None and self.part.over is None

    @property
    def next_job(self) -> str:
        """Return the job that is to carry the run on, and has not begun; "" without one."""
        launched = {Fields(event.fields).text("job") for event in self.events if event.kind == "launch"}
        waiting, cancelled = "", ""
        for event in self.events:
            f = Fields(event.fields)
            if event.kind == "successor" and f.data.get("acted", True) is not False:
                waiting = f.text("job")
            elif event.kind == "requeued_instead":
                waiting = f"{f.text('job')} (requeued)"
            elif event.kind == "successor_cancelled":
                cancelled = f.text("job")
                waiting = "" if waiting == cancelled else waiting
            elif event.kind == "launch" and waiting.endswith("(requeued)"):
                waiting = ""
        waiting = waiting or (self.chain.newest if self.chain.newest != cancelled else "")
        return "" if waiting in launched else waiting

    @property
    def active(self) -> bool:
        """Return whether a job of the run lives, or one is to follow."""
        return self.state.state != "ended" or bool(self.next_job)

    @property
    def link(self) -> int:
        """Return the number of the newest job in the chain."""
        links = [Fields(event.fields).whole("link") for event in self.events if event.kind == "launch"]
        return max((link for link in links if link is not None), default=len(links))

    def of_kind(self, *kinds: str, since: float = 0.0) -> list[Event]:
        """Return the events of these kinds, from ``since`` on."""
        return [event for event in self.events if event.kind in kinds and event.time >= since]


def read_facts(path: Path, now: float, seen: StepSeen | None = None) -> AlertFacts:
    """Return the facts of a run directory. Raises UsageError where it is none, Untrusted where it is another's."""
    path = find_run(path)
    run_id, created = read_identity(path)
    status = parse_status(trusted_files.read_object(path / "status.json"))
    verdict = parse_verdict(trusted_files.read_object(path / "verdict.json"))
    events = read_ledger(path / "ledger", KINDS)
    if not any(event.kind == "first_step" for event in events):
        events = read_ledger(path / "ledger", KINDS | {"ranks_started"})
    state = present(facts_of(events), created, status, verdict, now)
    return facts_from(path, run_id, events, state, now, _limits(path), seen)


def facts_from(
    path: Path, run_id: str, events: Sequence[Event], state: RunNow, now: float, chain: ChainLimits | None = None,
    seen: StepSeen | None = None,
) -> AlertFacts:  # fmt: skip
    """Return the facts from their parts. Pure. ``events`` by time."""
    known = state.status.time if state.status is not None and state.state != "ended" else None
    last = events[-1].time if events else now
    return AlertFacts(
        path, run_id, now, min(max(last, known or 0.0), max(now, last)), tuple(events), run_time(events, known), state,
        chain or ChainLimits(), tuple(faults(events)), seen,
    )  # fmt: skip


def _limits(path: Path) -> ChainLimits:
    """Return what ``launch.json`` and the user's order say; what cannot be read counts as not known."""
    order = chain_order.read(path)
    try:
        record = joining.read_record(path)
    except UsageError:  # another version's
        record = None
    try:
        newest = next((link.job for link in reversed(chain.read_links(path))), "")
    except OSError:
        newest = ""
    if record is None:
        return ChainLimits(jobs=order.limit, newest=newest, stopped=order.stopped)
    limit = order.limit_of(record.options.chain_max)
    most = None if limit >= chain_order.NO_LIMIT else limit
    chained = record.options.chain and record.job.isdecimal()  # a run outside of Slurm has no next job
    return ChainLimits(chained, most, newest, order.stopped, record.options.max_restarts)
