"""Wakes a process when files of a directory are written, by inotify."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_IN_MODIFY = 0x2
_READ_BYTES = 1 << 16


class DirectoryWatch:
    """Watches one directory. Writes through mapped memory are not seen, calls of write are.

    ``fd``: for poll, readable after a change; None where the kernel has no watch to give.
    """

    def __init__(self, directory: Path) -> None:
        """Begin to watch."""
        self.fd: int | None = None
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MODIFY) < 0:
            os.close(fd)
            return
        self.fd = fd

    def changed(self) -> bool:
        """Return whether there was a change since the last call; True where that is not known."""
        if self.fd is None:
            return True
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self.fd, _READ_BYTES))
        return False
