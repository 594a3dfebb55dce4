"""The kind of file system that an open file is on, by statfs(2)."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_TMPFS, _RAMFS = 0x01021994, 0x858458F6
_EXT, _XFS, _BTRFS, _F2FS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010


def is_in_memory(fd: int) -> bool:
    """Return whether it keeps its files in memory."""
    return _kind(fd) in (_TMPFS, _RAMFS)


def is_of_this_machine(fd: int) -> bool:
    """Return whether surely no other machine has it mounted."""
    return _kind(fd) in (_TMPFS, _EXT, _XFS, _BTRFS, _F2FS)


def _kind(fd: int) -> int:
    found = (ctypes.c_long * 32)()  # its first member is the type
    return found[0] & 0xFFFFFFFF if _libc.fstatfs(fd, found) == 0 else 0
