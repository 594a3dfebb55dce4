"""A writer to standard error whose callers never wait: it may be a file on a shared file system that hangs."""

from __future__ import annotations

import sys
import threading
from collections import deque

from resilio_hpc.core.terminal import plain

PATIENCE_S = 0.2
MOST_LINES = 1000


class PatientStream:
    """Lines for standard error, written by a thread. While it hangs, no caller waits, and old lines are dropped."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._hangs = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Pass a line to the thread, and wait for it for a moment only."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="standard error", daemon=True)
                self._thread.start()
            if len(self._lines) >= MOST_LINES:
                del self._lines[1]  # the first line may be half written
            self._lines.append(plain(line))
            self._changed.notify_all()
            if not self._hangs:
                self._hangs = not self._changed.wait_for(lambda: not self._lines, self._patience_s)

    def flush(self, limit_s: float | None = None) -> bool:
        """Return whether all lines are written, after at most ``limit_s`` (None: without a limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines, limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line = self._lines[0]
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except (OSError, ValueError):
                pass  # no process reads it any more
            with self._changed:
                self._lines.popleft()
                self._hangs = False
                self._changed.notify_all()
