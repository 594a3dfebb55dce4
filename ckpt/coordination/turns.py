"""Turns: one thread at a time uses a Checkpointer. Callers that would wait for ever are refused at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from resilio_hpc.core.errors import UsageError


class Turns:
    """Threads wait for each other. Two kinds of callers would wait for ever and are refused.

    A forked child has copies of locks and queues, and none of the threads that serve them. A signal handler that
    interrupts a save runs in the thread of that save.
    """

    def __init__(self, what: str) -> None:
        """Make turns; ``what``: the name of the object in messages."""
        self._what = what
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner = -1

    @property
    def is_forked(self) -> bool:
        """Return whether this is a forked child of the process that made the object."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise UsageError in a forked child."""
        if self.is_forked:
            raise UsageError(
                f"this {self._what} is of process {self._pid}, and its threads do not live in this forked child; make "
                "another one here, or use it in that process"
            )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the other threads. Raises UsageError for callers that would wait for ever."""
        self.check_process()
        me = threading.get_ident()
        if self._owner == me:
            raise UsageError(
                f"this thread is using the {self._what} already; a signal handler had better set a flag, and the loop "
                "save when it sees that"
            )
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = -1
