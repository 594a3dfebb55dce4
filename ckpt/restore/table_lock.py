"""The lock of the table of shared blocks, against other processes: of one byte of its file, held for a look only."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOCK_PATIENCE_S = 1.0
"""A process that holds it for longer was stopped."""
POLL_S = 0.0002


@contextmanager
def locked(fd: int, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a table, against other processes. Raises TimeoutError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            lock(fd, fcntl.F_WRLCK)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise TimeoutError("a process that shares blocks does not let go of their table") from None
            time.sleep(POLL_S)
    try:
        yield
    finally:
        lock(fd, fcntl.F_UNLCK)


def lock(fd: int, kind: int) -> None:
    """Lock for the open file, not the process: another thread may have it open there too. fcntl(2)."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi", kind, os.SEEK_SET, 0, 1, 0))
