"""Brings a verdict to the run directory, however long its file system hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilio_hpc.launch.rundir.storage import Storage

TIMEOUT_S = 120.0  # most hung file systems come back within this time; without a verdict the run's result is unknown
RETRY_S = 1.0


class VerdictWriter:
    """Asks until the verdict is durable, then calls ``written`` with the run's newest epoch; with 0 when it gave up."""

    def __init__(self, storage: Storage, written: Callable[[int], None]) -> None:
        self._storage = storage
        self._written = written
        self._verdict: dict[str, Any] | None = None
        self._due = self._next = 0.0

    def write(self, verdict: dict[str, Any], now: float) -> None:
        """Begin to write ``verdict``; ``now``: monotonic seconds."""
        self._verdict = verdict
        self._due = now + TIMEOUT_S
        self._next = now
        self.tick(now)

    def forget(self) -> None:
        """Forget the verdict of an earlier controller of this process."""
        self._verdict = None

    def tick(self, now: float) -> None:
        """Ask again; after ``TIMEOUT_S`` of a hung file system, release all agents without it."""
        verdict = self._verdict
        if verdict is None or now < self._next:
            return
        self._next = now + RETRY_S
        if now > self._due or self._storage.gone:
            self._done(0)
        else:
            self._storage.request("verdict", lambda reply: self._answered(verdict, reply), verdict=verdict)

    def _answered(self, verdict: dict[str, Any], reply: dict[str, Any] | None) -> None:
        if reply is not None and self._verdict is verdict:
            self._done(reply["epoch"])

    def _done(self, newest_epoch: int) -> None:
        self._verdict = None
        self._written(newest_epoch)
