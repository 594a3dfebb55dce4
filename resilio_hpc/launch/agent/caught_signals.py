"""The signals that an agent takes, as something to poll."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

SIGNALS = {
    signal.SIGUSR1: "USR2", signal.SIGUSR2: "USR2",  # sbatch --signal: either means that the time limit is near
    signal.SIGTERM: "TERM", signal.SIGINT: "INT", signal.SIGHUP: "TERM",
}  # fmt: skip


class CaughtSignals:
    """Catches them from now on. Python's wake-up descriptor tells which signal came."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor that is readable once a signal has come."""
        return self._reader.fileno()

    def received(self) -> Iterator[str]:
        """Yield what has come since: USR2, TERM or INT. Call it when the descriptor is readable."""
        for number in self._reader.recv(4096):
            if name := SIGNALS.get(signal.Signals(number)):
                yield name
