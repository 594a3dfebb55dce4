"""Tells the process that forks ranks when a stopped agent can end them no more, though their lease is over."""

from __future__ import annotations

import math
from pathlib import Path

from resilio_hpc.launch.process import process_tree

LOOK_S = 0.5
LEASE_SHARE = 0.5  # of the time after which a silent node is lost and others train: its ranks are gone by then


class StoppedAgent:
    """Looks at an agent's process. ``lost_s``: the heartbeat timeout, 0: never."""

    def __init__(self, pid: int, lost_s: float, proc: Path = process_tree.PROC) -> None:
        self._pid, self._proc = pid, proc
        self._patience_s = LEASE_SHARE * lost_s if lost_s else math.inf
        self._since: float | None = None
        self._looked = -math.inf

    def is_over(self, now: float) -> bool:
        """Return whether it was stopped for too long. ``now``: monotonic seconds.

        A job that Slurm suspends stops this process as well: that time does not count.
        """
        stopped = process_tree.stat(self._pid, self._proc)[:1] == [b"T"]
        if not stopped or now - self._looked > 4 * LOOK_S:
            self._since = None
        self._looked = now
        if stopped and self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._patience_s
