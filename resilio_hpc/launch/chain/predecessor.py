"""What the run directory and Slurm tell of another part of a run: the evidence for ``judge``."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.ckpt.store.checkpoint_index import committed_steps
from resilio_hpc.launch.allocation.placements import Site
from resilio_hpc.launch.chain import handover
from resilio_hpc.launch.chain.continuation_policy import ALIVE, MAX_FRUITLESS, PredecessorEvidence
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.chain.successor_options import handover_comment
from resilio_hpc.slurm.client import commands


def gather(run_path: Path, last: run_claim.Turn, site: Site, predecessor: str) -> PredecessorEvidence:
    """Return the evidence. ``last``: the newest turn; ``predecessor``: the job that submitted this one, or ""."""
    followed = last.job in (site.job, predecessor)
    ended = run_directory.read_verdict(run_path, last.part)
    verdict = str(ended.get("verdict", "")) if ended else ""
    state, by = part_state(last.part)
    record = handover_of(run_path, last.part)
    return PredecessorEvidence(
        last.part,
        chained=bool(predecessor),
        requeued=last.job == site.job,
        followed=followed,
        successor="" if followed else _successor(run_path, last, site.job),
        verdict=verdict,
        handover=record,
        state=state,
        by=by,
        fruitless=_fruitless(run_path),
    )


def part_state(part: str) -> tuple[str, str]:
    """Return Slurm's state at the end of a part, and who cancelled it.

    A requeued job has several runs: accounting keeps all of them, slurmctld only the newest. If its newest run was
    cancelled before it took a turn, the job counts as cancelled.
    """
    job, index = run_claim.job_of(part), run_claim.run_of(part)
    fields = commands.job_fields(job)
    state = (fields.get("JobState", "").split() or [commands.UNKNOWN])[0]
    own = fields.get("Restarts") == str(index)
    if own and state != "CANCELLED":
        return state, ""
    ends = commands.accounted_ends(job)
    last = ends[-1] if ends else commands.PartEnd(commands.UNKNOWN)
    if "CANCELLED" in (state, last.state):
        return "CANCELLED", last.by
    found = ends[index] if index < len(ends) else commands.PartEnd("REQUEUED" if fields else commands.UNKNOWN)
    if found.state == "REQUEUED" and not own and state not in (*ALIVE, commands.UNKNOWN):
        return state, ""  # a later run of the job ended before it took a turn
    return found.state, found.by


def handover_of(run_path: Path, part: str) -> handover.Handover | None:
    """Return the record of a part that the launcher itself closed, since no agent was left to end it.

    Its job's Comment may hold it.
    """
    return handover.read(run_path, part) or _comment_record(part)


def newest_commit(run_path: Path) -> int:
    """Return the newest durable step; -1 without one, or if it cannot be read."""
    try:
        return max(committed_steps(run_path / "checkpoints"), default=-1)
    except OSError:
        return -1


def _comment_record(part: str) -> handover.Handover | None:
    """Return a handover record that the run directory did not take, from the job's Comment."""
    comment = commands.job_fields(run_claim.job_of(part)).get("Comment", "")
    start = handover_comment(part, "")
    if not comment.startswith(start):
        return None
    return handover.Handover(part, "another node", comment.removeprefix(start), True, 0.0)


def _successor(run_path: Path, last: run_claim.Turn, own_job: str) -> str:
    """Return the job that follows ``last``'s in the chain, if it waits or runs and is not this one."""
    jobs = [link.job for link in chain.read_links(run_path)]
    after = jobs[jobs.index(last.job) + 1 :] if last.job in jobs else []
    alive = [job for job in after if job != own_job and commands.job_state(job) in ALIVE]
    return alive[0] if alive else ""


def _fruitless(run_path: Path) -> int:
    """Return how many parts in a row ended without a commit, and without a verdict or before the first step."""
    committed = newest_commit(run_path)
    count = 0
    for turn in run_claim.newest(run_path, MAX_FRUITLESS):
        verdict = run_directory.read_verdict(run_path, turn.part)
        too_short = verdict is not None and verdict.get("verdict") == "time_limit" and verdict.get("trained") is False
        if turn.committed != committed or not (verdict is None or too_short):
            break
        count += 1
    return count
