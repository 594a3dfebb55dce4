"""Regular files only: opening a named pipe or a device may wait for ever, or have an effect.

A file is checked before it is opened, and the opened file is that file, whatever its name means by then. Its owner does
not count here: checkpoints have checksums, and may be links. ``trusted_files`` is for files that are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


class NotRegular(OSError):
    """Raised for a name that exists and is no regular file."""


def open_file(path: Path, flags: int = os.O_RDONLY, follow: bool = True) -> int:
    """Open an existing regular file; return a descriptor that child programs do not inherit.

    ``flags``: as of os.open. ``follow`` False: a link is refused, whatever its target; for writes it always is. Raises
    NotRegular, OSError.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY:
        follow = False
    look = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    found = os.open(path, look)
    try:
        check_regular(found, path)
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)


def check_regular(fd: int, path: Path) -> None:
    """Raise NotRegular where the open file ``fd``, of this path, is no regular file."""
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        raise NotRegular(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", str(path))


def open_direct(path: Path, follow: bool = True) -> int:
    """Open a regular file to read it past the page cache if its file system allows it, else through it.

    Raises NotRegular, OSError.
    """
    try:
        return open_file(path, os.O_RDONLY | os.O_DIRECT, follow)
    except NotRegular:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_file(path, os.O_RDONLY, follow)


def read_file(path: Path, limit: int = -1, follow: bool = True) -> bytes:
    """Return a regular file's content, at most ``limit`` bytes. Raises NotRegular, OSError."""
    with os.fdopen(open_file(path, follow=follow), "rb") as file:
        return file.read(limit)


def size_of(path: Path, follow: bool = True) -> int:
    """Return the bytes of a regular file; -1 where none has that name. Raises nothing."""
    try:
        found = path.stat(follow_symlinks=follow)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def is_real_directory(path: Path) -> bool:
    """Return whether it is a directory, and not a link to one. Raises nothing."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def remove(path: Path, ignore_errors: bool = True) -> None:
    """Remove a directory with its content, or any other file of that name. Of a link only the link is removed.

    Without ``ignore_errors``, what cannot be removed raises OSError.
    """
    if is_real_directory(path):
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    with contextlib.suppress(OSError if ignore_errors else FileNotFoundError):
        path.unlink()
