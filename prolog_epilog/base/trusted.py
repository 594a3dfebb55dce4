"""Files that decide where jobs run: they are trusted if only root, or the reader, can have written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.core.errors import HealthError


def read(directory: Path, name: str, most_bytes: int) -> bytes:
    """Return a file's content. Raises FileNotFoundError; OSError and HealthError where it is not trusted."""
    own_directory(directory)
    fd = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        _own(directory / name, status, stat.S_ISREG)
        if status.st_size > most_bytes:
            raise HealthError(f"{directory / name} has {status.st_size} bytes")
        return file.read(most_bytes)


def own_directory(directory: Path) -> None:
    """Raise HealthError unless it is a directory of this user's or root's, closed to others' writing; OSError."""
    _own(directory, os.lstat(directory), stat.S_ISDIR)


def _own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise HealthError unless it is this user's or root's, of the right kind, and closed to others' writing."""
    if not is_kind(status.st_mode):
        raise HealthError(f"{path} is not what we would have made: remove it")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise HealthError(f"{path} belongs to user {status.st_uid} with mode {status.st_mode & 0o7777:o}: remove it")
