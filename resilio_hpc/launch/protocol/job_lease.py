"""The lease between two jobs of a run: how long a controller may lead unconfirmed. ``chain.fencing`` has the rules."""

from __future__ import annotations

JOB_LEASE_S = 60.0


class JobLease:
    """How long a controller may lead without an answer of its run directory or of Slurm. Pure; monotonic seconds.

    Both times are when the answer was *asked for*, not when it came.
    """

    def __init__(self, now: float, lease_s: float = JOB_LEASE_S) -> None:
        self._lease_s = lease_s
        self._until = now + lease_s

    def pulse_written(self, asked: float) -> None:
        """Take note that the run directory took the controller's pulse, and holds no newer epoch."""
        self._renew(asked)

    def slurm_says_running(self, asked: float) -> None:
        """Take note that ``squeue`` shows the job as RUNNING, so no later job of the chain runs."""
        self._renew(asked)

    def _renew(self, asked: float) -> None:
        self._until = max(self._until, asked + self._lease_s)

    def expired(self, now: float) -> bool:
        """Return whether another job may train by now, so that this one's ranks must stop."""
        return now >= self._until

    def ends_in_s(self, now: float) -> float:
        """Return the seconds until then. When less than half is left, Slurm should be asked."""
        return self._until - now
