"""The status of a run's chain: its jobs, how each part ended, what waits and for what. Fetched once, then judged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.chain import handover, joining
from resilio_hpc.launch.chain.continuation_policy import WORDS
from resilio_hpc.launch.chain.handover import Handover
from resilio_hpc.launch.chain.predecessor import newest_commit
from resilio_hpc.launch.config.options import DEFAULT_CHAIN_MAX
from resilio_hpc.launch.rundir import chain_order, run_claim, run_directory
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.launch.rundir.final_report import ENDINGS
from resilio_hpc.launch.rundir.run_claim import Turn
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.chain.chain import Link
from resilio_hpc.slurm.client.model import Job

ALL_TURNS = 100_000
ALIVE = ("PENDING", "RUNNING", "SUSPENDED")


class ChainEvidence(Struct, frozen=True):
    """What the run directory and Slurm show.

    ``jobs``: Slurm's answer by job number, None without an answer; ``judged``: how each part ended, as the part after
    it found; ``committed``: the newest durable step, or -1.
    """

    links: tuple[Link, ...]
    turns: tuple[Turn, ...]
    verdicts: Mapping[str, Mapping[str, Any]]
    handovers: Mapping[str, Handover]
    judged: Mapping[str, str]
    jobs: Mapping[str, Job] | None
    order: ChainOrder
    chain_max: int
    committed: int
    verdict: str = ""


class PartStatus(Struct, frozen=True):
    """One part of the run, or a job that has not begun. Times: Unix seconds; ``state``: Slurm's, "" where not known.

    ``committed``: the newest durable step (before it, after it), -1 for none; ``why``: how it ended, or what it waits
    for; ``start_expected``: Slurm's guess, or the end of the job before it at the latest.
    """

    link: int
    job: str
    part: str
    state: str
    began: float | None = None
    ended: float | None = None
    start_expected: float | None = None
    nodes: tuple[str, ...] = ()
    committed: tuple[int, int] | None = None
    why: str = ""

    @property
    def alive(self) -> bool:
        """Return whether, by Slurm's answer, the job waits or runs."""
        return self.state.split("+")[0] in ALIVE


class ChainStatus(Struct, frozen=True):
    """A chain's status.

    ``phase``: running, stopping, waiting, stopped, ended, complete, unknown (no answer of Slurm).

    ``limit``: jobs at most, None for no limit; ``running`` and ``waiting``: jobs.
    """

    run_dir: str
    phase: str
    parts: tuple[PartStatus, ...]
    limit: int | None
    order: ChainOrder
    answered: bool
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    @property
    def last_link(self) -> int:
        """Return the number of the newest job."""
        return max((part.link for part in self.parts), default=0)


class Jobs(Protocol):
    """The methods of a SlurmClient that are needed."""

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return those of these jobs that slurmctld remembers."""


def fetch(run_path: Path, client: Jobs) -> ChainEvidence:
    """Read the run directory and ask Slurm once. Raises OSError, UsageError."""
    links = tuple(chain.read_links(run_path))
    taken = tuple(reversed(run_claim.newest(run_path, ALL_TURNS)))
    parts = [turn.part for turn in taken]
    numbers = sorted({turn.job for turn in taken if turn.job.isdecimal()} | {link.job for link in links})
    try:
        jobs = {str(job.id): job for job in client.jobs(numbers)} if numbers else {}
    except SlurmError:
        jobs = None
    launch = joining.read_record(run_path)
    judged = {
        str(event.fields["part"]): str(event.fields["reason"])
        for event in read_ledger(run_path / "ledger")
        if event.kind == "predecessor" and {"part", "reason"} <= event.fields.keys()
    }
    return ChainEvidence(
        links,
        taken,
        {part: found for part in parts if (found := run_directory.read_verdict(run_path, part)) is not None},
        {part: record for part in parts if (record := handover.read(run_path, part)) is not None},
        judged,
        jobs,
        chain_order.read(run_path),
        launch.options.chain_max if launch else DEFAULT_CHAIN_MAX,
        newest_commit(run_path),
        str((run_directory.read_verdict(run_path) or {}).get("verdict", "")),
    )


def status_of(run_dir: str, evidence: ChainEvidence) -> ChainStatus:
    """Return the chain's status from its evidence. Pure."""
    begun = {turn.job for turn in evidence.turns}
    parts = [_part(evidence, index) for index in range(len(evidence.turns))]
    parts += [_not_begun(evidence, link) for link in evidence.links if link.job not in begun]
    parts.sort(key=lambda part: (part.link, part.began or float("inf")))
    running = tuple(part.job for part in parts if part.alive and part.state != "PENDING")
    waiting = tuple(part.job for part in parts if part.state.split("+")[0] == "PENDING")
    limit = evidence.order.limit_of(evidence.chain_max)
    return ChainStatus(
        run_dir,
        _phase(evidence, running, waiting),
        tuple(parts),
        None if limit >= chain_order.NO_LIMIT else limit,
        evidence.order,
        evidence.jobs is not None,
        running,
        waiting,
    )


def _phase(evidence: ChainEvidence, running: Sequence[str], waiting: Sequence[str]) -> str:
    if evidence.verdict == "completed":
        return "complete"
    if evidence.jobs is None:
        return "unknown"
    if running:
        return "stopping" if evidence.order.stopped else "running"
    if evidence.order.stopped:
        return "stopped"
    return "waiting" if waiting else "ended"


def _part(evidence: ChainEvidence, index: int) -> PartStatus:
    turn = evidence.turns[index]
    job = (evidence.jobs or {}).get(turn.job)
    newest = all(later.job != turn.job for later in evidence.turns[index + 1 :])
    verdict = evidence.verdicts.get(turn.part, {})
    record = evidence.handovers.get(turn.part)
    after = evidence.turns[index + 1].committed if index + 1 < len(evidence.turns) else evidence.committed
    state, ended = "", Fields(verdict).time("time") or (record.time if record else None)
    if not newest:
        state = "REQUEUED"
    elif job is not None:
        state = str(job.state)
        ended = job.end_time if job.state.ended and job.end_time else ended
    return PartStatus(
        turn.link, turn.job, turn.part, state, turn.time, ended, None, turn.nodes, (turn.committed, after),
        _why(evidence, turn.part, state, job if newest else None),
    )  # fmt: skip


def _why(evidence: ChainEvidence, part: str, state: str, job: Job | None) -> str:
    verdict, record = evidence.verdicts.get(part), evidence.handovers.get(part)
    if verdict is not None:
        name, reason = Fields(verdict).text("verdict"), Fields(verdict).text("reason")
        title = ENDINGS[name].title if name in ENDINGS else name
        return f"{title}: {reason}" if reason else title
    if record is not None:
        return f"closed by {record.by}: {record.reason}"
    if part in evidence.judged:
        return evidence.judged[part]
    if state == "PENDING" and job is not None:
        return f"waits to run again ({job.reason})"
    return WORDS.get(state.split("+")[0], "")


def _not_begun(evidence: ChainEvidence, link: Link) -> PartStatus:
    job = (evidence.jobs or {}).get(link.job)
    if job is None:
        why = "" if evidence.jobs is None else "Slurm does not know it any more"
        return PartStatus(link.number, link.job, "", "", why=why)
    state = str(job.state)
    if state != "PENDING":
        why = f"{job.state.base.lower()} before it began" if job.state.ended else "starts"
        return PartStatus(link.number, link.job, "", state, why=why)
    before = _before(job, evidence.jobs or {})
    expected = before.end_time if before is not None else job.start_time
    return PartStatus(link.number, link.job, "", state, start_expected=expected, why=_waits_for(job, before))


def _before(job: Job, jobs: Mapping[str, Job]) -> Job | None:
    """Return the job of the chain for whose end it waits: ``afterany:12`` or ``afterany:12(unfulfilled)``."""
    numbers = re.findall(r":(\d+)", job.dependency)
    return next((jobs[number] for number in numbers if number in jobs and not jobs[number].state.ended), None)


def _waits_for(job: Job, before: Job | None) -> str:
    if before is not None:
        return f"waits for the end of job {before.id}"
    if "reserved_for_maintenance" in job.reason.lower():
        return f"waits for the end of a maintenance reservation ({job.reason})"
    return f"waits: {job.reason}" if job.reason else "waits"
