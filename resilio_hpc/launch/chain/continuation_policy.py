"""Whether a job goes on where another part of the run stopped: evidence in, decision with its reason out. Pure.

SIGTERM does not tell its cause, and ``scancel -s KILL`` gives no warning; so the part that ends cannot judge itself.
The next part does, from what was left in the run directory first, and then from what Slurm says. What is not known
(``UNKNOWN``) is never taken for a user's wish to end the run.
"""

from __future__ import annotations

from msgspec import Struct

from resilio_hpc.launch.chain.handover import Handover
from resilio_hpc.launch.rundir.run_claim import job_of

# verdicts of a part after which the next job carries on
CONTINUES = ("time_limit", "needs_new_job")
# verdicts after which another try would end the same way, or that a user wanted
ENDS = ("no_progress", "not_enough_nodes", "interrupted", "agents_lost", "cancelled", "failed")
# Slurm's states of a job that runs, or will again
ALIVE = (
    "RUNNING", "COMPLETING", "CONFIGURING", "PENDING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
)  # fmt: skip
# ends that the job itself may have caused: without a verdict they count as tries
OWN_FAULT = ("FAILED", "OUT_OF_MEMORY", "COMPLETED", "TIMEOUT")
MAX_FRUITLESS = 3

WORDS = {
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "could not boot its nodes",
    "FAILED": "ended without a verdict (its batch script failed or was killed)",
    "OUT_OF_MEMORY": "ran out of memory",
    "COMPLETED": "ended without a verdict",
    "REQUEUED": "was requeued",
}


class PredecessorEvidence(Struct, frozen=True):
    """What is known of the part that had the turn before.

    ``chained``: the chain submitted this job; ``requeued``: it is the same job, started again by Slurm; ``followed``:
    it is the part that this job was to follow; ``successor``: the job after it, if it waits or runs; ``state``: Slurm's
    word for its end; ``by``: who cancelled it; ``fruitless``: how many parts in a row, it and those before it, ended
    without a commit, and without a verdict or before the first step.
    """

    part: str
    chained: bool = False
    requeued: bool = False
    followed: bool = True
    successor: str = ""
    verdict: str = ""
    handover: Handover | None = None
    state: str = "UNKNOWN"
    by: str = ""
    fruitless: int = 0


class Continuation(Struct, frozen=True):
    """The decision. ``verdict``: of this part, when it does not go on.

    ``clean``: no process of the part before can run.
    """

    goes_on: bool
    reason: str
    verdict: str = ""
    clean: bool = False


def judge(evidence: PredecessorEvidence) -> Continuation:
    """Return the decision of the first rule that applies."""
    ended_by_itself = bool(evidence.verdict) and evidence.verdict != "agents_lost"
    return _rival(evidence) or _order(evidence) or _chain(evidence) or Continuation(
        True, _how_it_ended(evidence), clean=ended_by_itself
    )  # fmt: skip


def _rival(evidence: PredecessorEvidence) -> Continuation | None:
    """Refuse where another job than the followed one has the run: exactly one may go on."""
    if evidence.followed:
        return None
    job = job_of(evidence.part)
    if evidence.state in ALIVE and not evidence.verdict:
        return Continuation(False, f"job {job} carries this run on: nothing to do here", "superseded")
    if evidence.successor:
        successor = evidence.successor
        return Continuation(
            False, f"job {successor} waits to carry this run on, or does (scancel {successor} otherwise)", "superseded"
        )
    return None


def _order(evidence: PredecessorEvidence) -> Continuation | None:
    """Go on for a user who requeued the job, or started it by hand.

    A verdict that carries on says it itself.
    """
    clean = bool(evidence.verdict) and evidence.verdict != "agents_lost"
    if evidence.requeued:
        how = f"{evidence.part} {WORDS[evidence.state]}" if evidence.state in WORDS else "Slurm started the job again"
        return Continuation(True, how, clean=clean)
    if not evidence.chained:
        return Continuation(True, "started by hand", clean=clean)
    cancelled = evidence.state == "CANCELLED" and evidence.handover is None  # while the part before stopped
    if evidence.verdict == "time_limit" and not cancelled and evidence.fruitless >= MAX_FRUITLESS:
        jobs = f"{evidence.fruitless} jobs in a row reached their time limit before the first step"
        return Continuation(False, f"{jobs}: ask for more time (sbatch --time); the chain ends here", "no_progress")
    if evidence.verdict in CONTINUES and not cancelled:
        return Continuation(True, f"{evidence.part} ended with {evidence.verdict}", clean=True)
    return None


def _chain(evidence: PredecessorEvidence) -> Continuation | None:
    """End the chain where the part before ended it; else return None."""
    part, handover = evidence.part, evidence.handover
    if evidence.verdict in ENDS:
        return Continuation(False, f"job {part} ended with {evidence.verdict}: the chain ends here", evidence.verdict)
    if handover is not None:
        if handover.carries_on:
            return None
        return Continuation(False, f"job {part} was closed by {handover.by}: {handover.reason}", "cancelled")
    if evidence.state == "CANCELLED":
        by = f" by user {evidence.by}" if evidence.by else ""
        return Continuation(False, f"job {part} was cancelled{by}: the chain ends here", "cancelled")
    if evidence.state == "DEADLINE":
        return Continuation(False, f"the deadline of job {part} has passed: the chain ends here", "cancelled")
    if not evidence.verdict and evidence.state in OWN_FAULT and evidence.fruitless >= MAX_FRUITLESS:
        tries = f"{evidence.fruitless} jobs in a row ended without a verdict and without a new checkpoint"
        return Continuation(False, f"{tries}: the chain ends here", "no_progress")
    return None


def _how_it_ended(evidence: PredecessorEvidence) -> str:
    if evidence.handover is not None:
        return f"{evidence.part} was closed by {evidence.handover.by}: {evidence.handover.reason}"
    if evidence.state in WORDS:
        return f"{evidence.part} {WORDS[evidence.state]}"
    return f"it is unknown how {evidence.part} ended ({evidence.state})"
