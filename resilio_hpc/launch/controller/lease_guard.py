"""The lease between two jobs of a run: a controller leads only while no other job can lead.

That is certain while the run directory takes its pulse and holds no newer epoch, or while Slurm says that its job runs,
since no later job of the chain can run then. With neither for ``LEASE_S``, it gives no leases.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.protocol.job_lease import JOB_LEASE_S, JobLease
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.runner import start_here

LEASE_S = JOB_LEASE_S * 0.75
QUIET_S = 5.0  # seconds that an elected controller may wait for its first proof before it says so
ASK_EVERY_S = 5.0
ANSWER_S = 20.0


class LinkGuard:
    """Guards the lease; never blocks: a child asks Slurm, and is killed when it hangs. ``job``: "" outside of Slurm."""

    def __init__(self, job: str, now: float, first: bool) -> None:
        self._job = job
        # an elected controller has no proof yet: its job may have ended long ago
        self._lease = JobLease(now if first else now - LEASE_S, LEASE_S)
        self._question: subprocess.Popen[bytes] | None = None
        self._asked = now if first else now - ASK_EVERY_S
        self._quiet_until = now if first else now + QUIET_S
        self._suspended = False

    def pulse_written(self, asked: float) -> None:
        """Take note that the run directory took the pulse and holds no newer epoch; ``asked``: when it was asked."""
        self._lease.pulse_written(asked)

    def may_lead(self, now: float) -> bool:
        """Return whether leases may be given."""
        return not self._job or not self._lease.expired(now)

    def changed(self, now: float) -> bool:
        """Return whether ``may_lead`` has changed since the last call, and that is worth a message."""
        if now < self._quiet_until and not self._suspended and not self.may_lead(now):
            return False
        before, self._suspended = self._suspended, not self.may_lead(now)
        return before != self._suspended

    def tick(self, now: float) -> None:
        """Ask Slurm when the run directory has not answered for long."""
        if not self._job:
            return
        if self._question is not None:
            self._read(now)
        elif self._lease.ends_in_s(now) < LEASE_S / 2 and now - self._asked > ASK_EVERY_S:
            self._asked = now
            self._question = start_here(["squeue", "-h", "-j", commands.address(self._job), "-o", "%T|%N"])

    def _read(self, now: float) -> None:
        question = self._question
        assert question is not None and question.stdout is not None
        if question.poll() is None:
            if now - self._asked > ANSWER_S:
                self.close()
            return
        self._question = None
        with question.stdout as answer:
            if holds_us(answer.read().decode(errors="replace"), self._job, os.environ):
                self._lease.slurm_says_running(self._asked)

    def close(self) -> None:
        """Stop asking."""
        if self._question is not None:
            self._question.kill()
            self._question.communicate()
            self._question = None


def holds_us(answer: str, job: str, environment: Mapping[str, str]) -> bool:
    """Return whether ``STATE|NODES`` says that the job runs on this node. Pure.

    If not, it may be a later run of a requeued job. About a node that joined from another job, the run's own job says
    nothing.
    """
    state, _, nodes = answer.strip().partition("|")
    if state != "RUNNING":
        return False
    if environment.get("SLURM_JOB_ID") != job:
        return True
    try:
        return environment.get("SLURMD_NODENAME") in expand(nodes)
    except UsageError:
        return False
