"""Tells whether the kernel killed a rank for lack of memory: it counts what it kills, before it sends the signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.core.memory_left import memory_uses, oom_kills
from resilio_hpc.events.memory_text import size
from resilio_hpc.launch.workers.output.error_file import describe_exit

SAME_S = 5.0  # kills of one shortage; several ranks may end by it


class OomKills:
    """Compares the kernel's counts with those before. Reading them waits for no process and no disk."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        """Read the counts. ``root``: below which /proc and /sys are."""
        self._root, self._clock = root, clock
        self._known = self._new = oom_kills(root)
        self._new_at = clock()

    def why(self) -> str:
        """Return what the kernel's counts say of a rank that was killed just now; "" where it was not the kernel."""
        found, now = oom_kills(self._root), self._clock()
        if now - self._new_at > SAME_S:
            self._known = self._new
        if found != self._new:
            self._new, self._new_at = found, now
        for place, before, after in zip(("job", "machine"), self._known, found, strict=True):
            if before is not None and after is not None and after > before:
                return self._words(place, after - before)
        return ""

    def end_in_words(self, exit_code: int | None, number: int | None) -> str:
        """Return how a process ended just now, with the kernel's reason where it has one."""
        why = self.why() if number == signal.SIGKILL else ""
        return f"killed by SIGKILL: {why}" if why else describe_exit(exit_code, number)

    def _words(self, place: str, count: int) -> str:
        uses = memory_uses(self._root) if place == "job" else []
        tightest = min((use.limit_bytes for use in uses), default=0)
        limit = f"the memory limit of its cgroup, {size(tightest)}, was reached" if tightest else "memory was full"
        where = "in this job (oom_kill event)" if place == "job" else "on this node"  # as Slurm's, for diagnose/causes
        times = f"{count} processes" if count > 1 else "one process"
        return f"the kernel's out-of-memory killer ended {times} {where}: {limit}"
