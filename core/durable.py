"""Files that are either the old or the new one, whole, whatever dies in between."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.core import regular_file
from resilio_hpc.core.file_system import is_of_this_machine

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)  # each further object is garbage for a while


def write_atomic(path: Path, data: bytes, mode: int = 0o644, durable: bool = True) -> None:
    """Replace ``path`` by ``data``: temporary file in the same directory, fsync, rename, fsync of the directory.

    Without ``durable`` nothing is synced: readers still see the old or the new file, but a power cut may lose both.
    """
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def create_exclusive(path: Path, data: bytes, mode: int = 0o600) -> bool:
    """Create ``path`` with its whole content; return False if it exists. Exclusive on NFS too.

    There link(2) is exclusive too. But where the answer to it is lost, the client asks again and learns that the name
    exists. The winner is then known by the number of links of the temporary file, whose name no other process knows
    (open(2), O_EXCL).
    """
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            if Path(temporary).stat().st_nlink != 2:
                return False
    finally:
        Path(temporary).unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


@contextmanager
def new_file(path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[int]:
    """Give a descriptor of a file that appears as ``path``, whole and durable, at the end; else nothing remains.

    ``former``: a file of the same file system that has no use any more. If no other process can use it, it becomes the
    new file, which has to be overwritten, since it has its old content; else it is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = _taken(former, temporary) if former is not None else None
        if fd is None:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _taken(former: Path, temporary: Path) -> int | None:
    """Take the file from its old name, before any check. A directory that is a link belongs to another program."""
    try:
        folder = os.open(former.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.rename(former.name, temporary, src_dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):
        fd = regular_file.open_file(temporary, os.O_RDWR)
        if is_ours_alone(fd):
            return fd
        os.close(fd)
    regular_file.remove(temporary)
    return None


def is_ours_alone(fd: int) -> bool:
    """Return whether only this process can use a file that is open for writing: no other has it open or mapped.

    It must also have one name, and be this user's. The kernel grants a lease then, and only then (fcntl(2),
    F_SETLEASE). It knows of this machine alone, so on file systems that others may have mounted it is never sure.
    """
    if not is_of_this_machine(fd):
        return False
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory, with those above it that are missing, durable on return.

    The name of the lowest one that exists is synced too: its maker may have died before it was.
    """
    missing = []
    there = path
    while not there.is_dir():
        missing.append(there)
        there = there.parent
    with contextlib.suppress(PermissionError):  # some of the directories above may not be readable
        sync_directory(there.parent)
    for new in reversed(missing):
        new.mkdir(mode, exist_ok=True)
        sync_directory(new.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names of one file system, at once; return False where it cannot do that (NFS), else OSError.

    renameat2(2), RENAME_EXCHANGE. Not durable before their directories are synced.
    """
    try:
        rename = _libc.renameat2
    except AttributeError:  # the C library lacks it
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
