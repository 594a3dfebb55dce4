"""A process to which things happen, and which can be stopped and go on."""

from __future__ import annotations

from collections.abc import Callable


class Process:
    """``suspended``: it was stopped (SIGSTOP), and what happens to it waits."""

    def __init__(self) -> None:
        self.alive = True
        self.suspended = False
        self._waiting: list[Callable[[], None]] = []

    def event(self, call: Callable[[], None]) -> None:
        """Something happens to this process: now, when it goes on, or never."""
        if self.suspended:
            self._waiting.append(call)
        elif self.alive:
            call()

    def suspend(self) -> None:
        """SIGSTOP."""
        self.suspended = True

    def resume(self) -> None:
        """SIGCONT: everything that has waited happens in its order, then time is noticed."""
        self.suspended = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.event(call)
        self.tick()

    def tick(self) -> None:
        """Let time pass."""
        raise NotImplementedError
