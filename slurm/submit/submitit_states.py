"""The state of a chain of jobs for submitit's watcher: one word per first job. Pure, except ``ask``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.slurm.chain.chain import read_links
from resilio_hpc.slurm.client.commands import TIMEOUT_S, UNKNOWN
from resilio_hpc.slurm.client.runner import run_here

COMPLETED = "completed"
# verdicts after which no next job runs: all except those that a next job of the chain follows
CONTINUES = ("time_limit", "needs_new_job", "terminated")
ENDED_AS = {"time_limit": "TIMEOUT", "terminated": "CANCELLED", "cancelled": "CANCELLED", "interrupted": "CANCELLED"}
PURGED = "PURGED"  # Slurm answers, and does not know the job any more
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PREEMPTED")


@dataclass(frozen=True)
class JobStates:
    """Slurm's answer about jobs; ``sure``: it answered, so a missing job is purged."""

    states: Mapping[str, str]
    nodes: Mapping[str, str]
    sure: bool


@dataclass(frozen=True)
class RunEnd:
    """How the newest part of a run ended; empty texts before any ended."""

    verdict: str = ""
    reason: str = ""
    failure: str = ""


def read_verdict(run_directory: Path) -> RunEnd:
    """Return the verdict in the run directory. Raises Untrusted."""
    f = Fields.of(trusted_files.read_object(run_directory / "verdict.json"))
    first = f.inner("first_failure")
    what = first.text("message") or first.text("kind")
    failure = f"rank {first.whole('rank')} on {first.text('node')}: {what}" if first.data else ""
    return RunEnd(f.text("verdict"), f.text("reason"), failure)


def jobs_of(job: str, run_directory: Path) -> list[str]:
    """Return the jobs of a chain, in order; the first one alone before a second is submitted."""
    return [link.job for link in read_links(run_directory)] or [job]


def ask(jobs: Sequence[str]) -> JobStates:
    """Ask with one squeue for all jobs, and one sacct for those that it does not know any more."""
    numbers = sorted({job.split("_")[0] for job in jobs})
    try:
        argv = ["squeue", "-h", "-r", "-t", "all", "-j", ",".join(numbers), "-o", "%i|%T|%N"]
        text, sure = run_here(argv, TIMEOUT_S).stdout, True
    except CommandError as error:
        text, sure = "", "Invalid job id" in error.stderr
    states, nodes = parse(text)
    missing = sorted({job.split("_")[0] for job in jobs if job not in states})
    if missing:
        try:
            argv = ["sacct", "-n", "-X", "-P", "-j", ",".join(missing), "-o", "JobID,State,NodeList"]
            older, older_nodes = parse(run_here(argv, TIMEOUT_S).stdout)
            states, nodes = {**older, **states}, {**older_nodes, **nodes}
        except CommandError:
            pass  # no accounting here
    return JobStates(states, nodes, sure)


def parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the states of lines ``12_3|RUNNING|n[1-2]`` (squeue), ``12|CANCELLED by 0|None assigned`` (sacct).

    Pure.
    """
    states, nodes = {}, {}
    for line in text.splitlines():
        job, state, names, *_ = [*line.split("|"), "", "", ""]
        if job and state.split():
            states[job] = state.split()[0].rstrip("+")
            nodes[job] = names
    return states, nodes


def living(jobs: Sequence[str], answer: JobStates) -> list[str]:
    """Return the jobs that run, or will, or whose state is unknown. Pure."""
    absent = PURGED if answer.sure else UNKNOWN
    return [job for job in jobs if answer.states.get(job, absent) in (*_RUNNING, *_WAITING, UNKNOWN)]


def chain_state(states: Sequence[str], verdict: str, chained: bool) -> str:
    """Return one word for a whole chain. Pure.

    ``states``: those of its jobs, in order. The next job waits from the start of each one, and is cancelled when no
    work is left: only while no other runs does its state count. UNKNOWN is never taken for an end.
    """
    if verdict == COMPLETED:
        return "COMPLETED"
    if verdict and not (chained and verdict in CONTINUES):
        return ENDED_AS.get(verdict, "FAILED")
    for words in (_RUNNING, (UNKNOWN,), _WAITING):
        found = [state for state in states if state in words]
        if found:
            return found[0]
    ran = [state for state in states if state != "CANCELLED"]
    return ran[-1] if ran else (states[-1] if states else UNKNOWN)
