"""One look at something that may hang, by a process that is killed when its time is up.

It prints what it finds line by line, so what came before it hung is used. Where it cannot be killed, it is left behind.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_BYTES = 1 << 20


class HelperLook:
    """A look under way. ``line_came`` gets each line."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        within_s: float,
        line_came: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to look. ``log``: where standard error goes."""
        self.timed_out = False
        self.within_s = within_s
        self._line_came = line_came
        self._clock = clock
        self._deadline = clock() + within_s
        self._buffer = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def over(self) -> bool:
        """Take the results. Return whether they are complete, or the time is up."""
        try:
            while data := os.read(self.fileno(), 65536):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._line_came(line)
        except BlockingIOError:
            if self._clock() < self._deadline and len(self._buffer) < MOST_BYTES:
                return False
            self.timed_out = True
        self.end()
        return True

    def end(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        assert self._process.stdout
        self._process.stdout.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel; Python reaps it when it is dead
