"""Closes a job that has no supervisor any more, since its batch host is lost.

Slurm keeps such a job (``--no-kill``) until its time limit, though none of its processes runs any more. The last agent
writes a handover record (``handover.py``), so that the next job does not take the launcher's CANCELLED for its user's;
then it cancels. Several agents may do so at once, one may die in between, slurmctld may be away: all of it may be
repeated.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import ResilioError, SlurmError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.launch.chain import handover, joining, preemption
from resilio_hpc.launch.chain.continuation_policy import CONTINUES
from resilio_hpc.launch.chain.fencing import last_pulse
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.process.bounded import bounded
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.chain.successor_options import handover_comment
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import Unanswered

STILL_S = 10.0  # within this time, a living controller moves its pulse several times
LIMIT_S = 600.0  # Slurm needs SlurmdTimeout (300 s) to declare the batch host lost
STAND_INS = 2
SRUN_S = 5.0  # time for the host of the step's srun to answer


class CleanupLimits(Struct, frozen=True):
    """Times to wait for other agents and for Slurm, in seconds."""

    supervisor_s: float = 30.0
    """One that lives has closed the run within FAREWELL_S (supervisor.py), and ended us."""
    files_s: float = 20.0
    """For the run directory to answer."""
    cancel_s: float = 240.0
    """For slurmctld to come back."""
    poll_s: float = 1.0


PATIENCE = CleanupLimits()


class Sight(Struct, frozen=True):
    """One look.

    ``holding``: Slurm's answer about the job, None without one; ``pulse``: of the run's leader; ``verdict``: the
    part's, "" without; times in monotonic seconds.
    """

    now: float
    holding: commands.Holding | None
    pulse: object
    verdict: str


class Closing:
    """The decision whether this agent may close the job. Pure.

    With a verdict, a supervisor that runs closes the run by itself and soon. Without one, another controller may lead
    the run unseen. ``cut_off``: from those who had the verdict; then only Slurm can tell whether the batch host is
    lost, or this node is cut off.
    """

    def __init__(
        self, now: float, verdict: str, cut_off: bool = False, supervisor_s: float = PATIENCE.supervisor_s
    ) -> None:
        self._cut_off = cut_off
        self._supervisor_s = supervisor_s
        self._began = self._moved = now
        self._verdict = verdict
        self._pulse: object = None
        self._moves = -1  # the first look only learns the pulse

    def look(self, sight: Sight) -> str:
        """Return "close", "over" (the job has ended), "others" (another agent leads the run), or "wait"."""
        holding = sight.holding
        if holding is not None and holding.state not in ("RUNNING", "SUSPENDED"):
            return "over"
        if sight.pulse != self._pulse or self._moves < 0:
            self._pulse, self._moved, self._moves = sight.pulse, sight.now, self._moves + 1
        host_lost = holding is not None and bool(holding.nodes) and holding.batch_host not in holding.nodes
        waited_s = sight.now - self._began
        if self._cut_off and not host_lost:
            return "others" if waited_s >= LIMIT_S else "wait"
        if self._verdict or sight.verdict:
            return "close" if host_lost or waited_s >= self._supervisor_s else "wait"
        if self._moves > 0:
            return "others"
        still = sight.now - self._moved >= STILL_S
        return "close" if still and (host_lost or waited_s >= LIMIT_S) else "wait"


def close_job(
    run_path: Path,
    part: str,
    verdict: Mapping[str, Any] | None = None,
    reason: str = "",
    cut_off: bool = False,
    patience: CleanupLimits = PATIENCE,
) -> bool:
    """Close the job of this agent; never raises, ends within bounds.

    ``part``: the job's (``placements.Site.key``); ``verdict``: the part's, where one was reached, else it is looked up;
    ``reason``: for the record (such as "batch_host_lost"). Return whether the job is over or was cancelled; False where
    another agent leads the run, or Slurm did not answer for ``patience.cancel_s``.
    """
    try:
        known = str((verdict or {}).get("verdict", ""))
        return _close(run_path, part, known, reason or "batch_host_lost", cut_off, patience)
    except (ResilioError, OSError, ValueError) as error:
        say(f"job {part} could not be closed from here: {error}")
        return False


def stand_in(run_path: Path, part: str, nodes: Sequence[str], patience: CleanupLimits = PATIENCE) -> None:
    """At the end of an srun step's part, on every node but the first: close the job if its batch host is lost.

    The srun of the step is lost with it, and Slurm keeps the job until its time limit. ``nodes``: the step's.
    """
    status = Fields(bounded(lambda: last_status(run_path, part), {}, patience.files_s))
    lost = status.texts("lost")
    node = os.environ.get("SLURMD_NODENAME", "")
    # nodes on the batch host's side of a cut may not reach Slurm
    if node in lost[:STAND_INS] and not reaches_srun(os.environ):
        close_job(run_path, part, cut_off=True, patience=patience)
    elif node in stand_ins(nodes, lost, status.text("controller")):
        holding = commands.holding(run_claim.job_of(part))
        if holding is None or holding.batch_host in lost or holding.batch_host not in holding.nodes:
            close_job(run_path, part, patience=patience)


def reaches_srun(environment: Mapping[str, str]) -> bool:
    """Return whether the host of the step's srun answers, so that srun ends step and job itself; True where unknown."""
    host, port = environment.get("SLURM_SRUN_COMM_HOST", ""), environment.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host, int(port)), SRUN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def last_status(run_path: Path, part: str) -> dict[str, Any]:
    """Return the status of a part's last controller; empty when another part has the run by now."""
    epoch = run_directory.newest_epoch(run_path)
    status = trusted_files.read_object(run_path / "status.json") or {}
    return status if epoch is not None and (epoch.epoch, epoch.job) == (status.get("epoch"), part) else {}


def stand_ins(nodes: Sequence[str], lost: Sequence[str], controller: str) -> tuple[str, ...]:
    """Return the nodes that close a job whose batch host is lost: two or more, but few, so as not to flood Slurm.

    Pure.
    """
    left = [node for node in nodes if node not in lost]
    return tuple(node for node in left if node == controller or node in left[:STAND_INS]) if lost else ()


def _close(run_path: Path, part: str, verdict: str, reason: str, cut_off: bool, patience: CleanupLimits) -> bool:
    job = run_claim.job_of(part)
    closing = Closing(time.monotonic(), verdict, cut_off, patience.supervisor_s)
    while True:
        verdict = verdict or _verdict(run_path, part, patience)
        pulse = bounded(lambda: last_pulse(run_path), None, patience.files_s)
        answer = closing.look(Sight(time.monotonic(), commands.holding(job), pulse, verdict))
        if answer != "wait":
            break
        time.sleep(patience.poll_s)
    if answer == "others":
        say(f"job {job} is left alone: another controller leads its run")
        return False
    if answer == "over":
        return True
    if preemption.under_way(job):
        preemption.stay_until_ended(job)  # a job that is cancelled now is not requeued
    return hand_over(run_path, part, verdict, reason, patience)


def hand_over(run_path: Path, part: str, verdict: str, reason: str, patience: CleanupLimits = PATIENCE) -> bool:
    """Write the record; then cancel the next job, if it has no work, and this one."""
    job = run_claim.job_of(part)
    carries_on = verdict in ("", *CONTINUES, "terminated")
    node = os.environ.get("SLURMD_NODENAME", "?")
    say(f"the batch host of job {job} is lost: the job is closed from {node} ({reason})")
    left = bounded(lambda: handover.leave(run_path, part, node, reason, carries_on), None, patience.files_s)
    if carries_on and left is None and not _note_in_comment(part, reason, patience):
        return False  # cancelled without a record, the chain would end
    none: list[str] = []
    next_jobs = bounded(lambda: following(run_path, job), none, patience.files_s)
    unsubmitted = carries_on and not next_jobs and bounded(lambda: chained(run_path, part), False, patience.files_s)
    if unsubmitted and commands.job_fields(job).get("Requeue") == "1":
        return give_order(job, commands.requeue, patience)
    return all(give_order(number, commands.cancel, patience) for number in [*(none if carries_on else next_jobs), job])


def chained(run_path: Path, part: str) -> bool:
    """Return whether the part was to have a next job."""
    record = joining.read_record(run_path)
    return record is not None and record.key == part and record.chained


def following(run_path: Path, job: str) -> list[str]:
    """Return the jobs of the chain after this one."""
    jobs = [link.job for link in chain.read_links(run_path)]
    return jobs[jobs.index(job) + 1 :] if job in jobs else []


def give_order(job: str, order: Callable[[str], None], patience: CleanupLimits) -> bool:
    """Repeat ``order`` until slurmctld carries it out. Return whether the job has ended, by it or otherwise."""
    deadline = time.monotonic() + patience.cancel_s
    while True:
        try:
            order(job)
            return True
        except SlurmError as error:
            holding = commands.holding(job)
            if holding is not None and holding.state not in ("RUNNING", "PENDING", "SUSPENDED"):
                return True
            if time.monotonic() > deadline:
                say(f"job {job} could not be ended: {error}")
                return False
        time.sleep(patience.poll_s)


def _note_in_comment(part: str, reason: str, patience: CleanupLimits) -> bool:
    """Write into the job's Comment, for the next job, what the run directory does not take."""
    job = run_claim.job_of(part)
    deadline = time.monotonic() + patience.cancel_s
    while True:
        try:
            commands.set_comment(job, handover_comment(part, reason))
            return True
        except SlurmError as error:
            if not isinstance(error, Unanswered) or time.monotonic() > deadline:
                say(f"job {job} is left alone: neither its run directory nor Slurm takes the handover record: {error}")
                return False
        time.sleep(patience.poll_s)


def _verdict(run_path: Path, part: str, patience: CleanupLimits) -> str:
    found = bounded(lambda: run_directory.read_verdict(run_path, part), None, patience.files_s)
    return str(found.get("verdict", "")) if found else ""
