"""Keys that are pressed on a terminal, without waiting for the end of a line."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType

_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b": "escape",
          b"\x1bOA": "up", b"\x1bOB": "down", b" ": "page down", b"\x04": "q"}  # fmt: skip

_KEY = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|.", re.DOTALL)


class PressedKeys:
    """Reads keys of standard input while it is entered; without a terminal there it only waits.

    Ctrl-C and Ctrl-Z work as ever. After Ctrl-Z and ``fg`` keys are read again.
    """

    def __init__(self) -> None:
        self._before: list[object] | None = None
        self._pressed = b""

    @property
    def are_read(self) -> bool:
        """Return whether there is a terminal to read keys from."""
        return self._before is not None

    def __enter__(self) -> PressedKeys:
        try:
            if sys.stdin is not None and sys.stdin.isatty():
                self._before = termios.tcgetattr(0)
                self._set()
                signal.signal(signal.SIGCONT, self._again)
        except (OSError, ValueError, termios.error):  # closed, or no terminal after all
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
            try:
                termios.tcsetattr(0, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]
            except termios.error:  # the terminal is gone
                pass

    def _set(self) -> None:
        tty.setcbreak(0, termios.TCSADRAIN)

    def _again(self, _number: int, _frame: FrameType | None) -> None:
        try:
            self._set()
        except (OSError, termios.error):
            pass

    def wait(self, seconds: float) -> str:
        """Return the key that is pressed within so many seconds, as its letter or name; "" without one.

        "q" where the terminal is gone.
        """
        if self._before is None:
            time.sleep(seconds)
            return ""
        if not self._pressed and select.select([0], [], [], seconds)[0]:
            try:
                self._pressed = os.read(0, 256) or b"q"
            except OSError:
                self._pressed = b"q"
        found = _KEY.match(self._pressed)
        if found is None:
            return ""
        self._pressed = self._pressed[found.end() :]
        return _NAMES.get(found[0], found[0].decode("ascii", "replace"))
