"""The lease between two jobs of a run: how long a controller may lead unconfirmed. ``chain.fencing`` has the rules."""

from __future__ import annotations

JOB_LEASE_S = 60.0


class JobLease:
    """How long a controller may lead without hearing from its run directory or from Slurm. Pure; monotonic seconds.

    Both times are when the answer was *asked for*, not when it came."""

    def __init__(self, now: float, lease_s: float = JOB_LEASE_S) -> None:
        self._lease_s = lease_s
        self._until = now + lease_s

    def pulse_written(self, asked: float) -> None:
        """Learn that the run directory took our pulse, and knows no newer epoch."""
        self._renew(asked)

    def slurm_says_running(self, asked: float) -> None:
        """``squeue`` says that our job is RUNNING: then no later job of the chain runs."""
        self._renew(asked)

    def _renew(self, asked: float) -> None:
        self._until = max(self._until, asked + self._lease_s)

    def expired(self, now: float) -> bool:
        """Whether another job may train by now: our ranks must be stopped."""
        return now >= self._until

    def ends_in_s(self, now: float) -> float:
        """Seconds until then; when less than half is left, Slurm should be asked."""
        return self._until - now
