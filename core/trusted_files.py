"""Files that are executed or trusted: they belong to this user or to root, and only their owner can write them.

A group's directory, ``/tmp`` and ``/dev/shm`` let other users put, rename and replace files. So every file of a run
directory and of a node's private directory is opened here. The directory and the file are opened without following
links, and what is checked is the open descriptor: nothing changes between check and use. A path is refused with
``Untrusted``, which names it and says what to do.

A directory of this user that is open to others is closed: older versions made theirs with the umask. A file of this
user that is open to others is refused, since its content may be another user's by now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.json_fields import parse_object, printable

OTHERS_WRITE = 0o022
MOST_BYTES = 16 << 20
RUN_PARTS = ("ledger", "logs", "checkpoints", "links", "joiners")
_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)


def open_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file and return its descriptor; a pipe or a device of that name never blocks.

    ``flags`` may create it, with ``mode`` at most. Raises Untrusted, OSError.
    """
    directory = open_directory(path.parent)
    try:
        safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(path.name, flags | safe, mode & ~OTHERS_WRITE, dir_fd=directory)
    except OSError as error:
        if error.errno in _LINK:
            raise Untrusted(f"{_shown(path)} is a link, and where it leads may change: remove it") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(directory)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(f"{_shown(path)} is no regular file: remove it")
        _check_owner(path, status, "remove it unless you want what is in it")
        if status.st_mode & OTHERS_WRITE:
            raise Untrusted(
                f"{_shown(path)} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}): "
                "look at what is in it, then chmod go-w it or remove it"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_directory(path: Path) -> int:
    """Open a directory and return its descriptor; this user's own gets closed to others. Raises Untrusted, OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _LINK and path.is_symlink():
            raise Untrusted(f"{_shown(path)} is a link, and where it leads may change: name the directory") from None
        raise
    try:
        _check_directory(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_directory(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    _check_owner(path, status, "use a directory of your own, or do this as that user")
    if not status.st_mode & OTHERS_WRITE:
        return
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):  # a file system that is mounted read-only
            os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
            return
    raise Untrusted(
        f"other users can write in {_shown(path)} (mode {stat.S_IMODE(status.st_mode):o}): use a directory of your own"
    )


def read(path: Path, limit_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises Untrusted, OSError (also for more than ``limit_bytes``)."""
    fd = open_file(path)
    try:
        with open(fd, "rb", closefd=False) as file:
            content = file.read(limit_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """Return the text of a file, bytes that are not UTF-8 replaced. Raises Untrusted, OSError."""
    return read(path).decode(errors="replace")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where it is missing or unreadable. Raises Untrusted."""
    try:
        return parse_object(read(path))
    except OSError:
        return None


def make_directory(path: Path) -> None:
    """Create a directory, with those above it that are missing; others cannot write in it. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(0o755, exist_ok=True)


def closed_umask() -> int:
    """Return this process's umask without others' right to write. Call it while no other thread makes files."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask | OTHERS_WRITE


def run_directory(path: Path) -> Path:
    """Return the real path of a run directory in which only its owner can change anything.

    ``path`` may be a link that this user has made. This user's own directories of an older version are closed to
    others. A directory that other users share, and that is no run directory yet, is refused. Raises Untrusted, OSError.
    """
    path = _real(path)
    status = path.stat()
    shared = status.st_mode & OTHERS_WRITE and status.st_uid == os.geteuid()
    if shared and not _is_run(path) and any(_is_strange(entry.name) for entry in path.iterdir()):
        raise Untrusted(f"{_shown(path)} is a directory that other users share: name a new one for the run in it")
    os.close(open_directory(path))
    for part in RUN_PARTS:
        with contextlib.suppress(FileNotFoundError):
            if part != "checkpoints" or not (path / part).is_symlink():  # its user may keep them elsewhere
                os.close(open_directory(path / part))
    return path


def close_directories(path: Path) -> None:
    """Close the directories in ``path`` to others, where they are this user's. Raises Untrusted, OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if entry.is_dir(follow_symlinks=False) and _is_open(entry.stat(follow_symlinks=False)):
                    os.close(open_directory(Path(entry.path)))


def _is_open(status: os.stat_result) -> bool:
    return bool(status.st_mode & OTHERS_WRITE) or status.st_uid not in (0, os.geteuid())


def _is_strange(name: str) -> bool:
    """Return whether no launcher would make this name, so that the directory is no new run directory. Pure."""
    return name not in (*RUN_PARTS, "secret") and not name.startswith((".secret.", ".run.json."))


def _is_run(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return (path / "run.json").lstat().st_uid == os.geteuid()
    return False


def _real(path: Path) -> Path:
    """Follow a link of this user's or root's, and no other's."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        _check_owner(path, status, "name the directory to which it leads")
    return Path(os.path.realpath(path))  # resolve() raises RuntimeError for links in a circle


def is_own(path: Path) -> bool:
    """Return whether ``path`` is a directory of this user, and no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _check_owner(path: Path, status: os.stat_result, advice: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{_shown(path)} belongs to {_name(status.st_uid)}, not to you: {advice}")


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _shown(path: Path) -> str:
    return printable(str(path), 500)
