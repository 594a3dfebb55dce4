"""What users report of a node: files in a spool that any user may write to and none can list.

Forgeable, so all that comes of a report is that root checks its own node once more; what those checks find decides,
never the report.

    /var/spool/resilio/reports/     1733, root's: sticky, so no user removes or renames what another has put there

``take`` reads it as root must read what others wrote: no name or path from outside is trusted; links, pipes, devices,
hard links and large files are not read; who reported is the file's owner, not what the file says.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from resilio_hpc.core.errors import HealthError, UsageError
from resilio_hpc.core.json_fields import printable

SPOOL = Path("/var/spool/resilio/reports")
MODE = 0o1733
MOST_BYTES = 4096
# in one turn: entries that are listed, files whose owner is looked up, files that are opened
MOST_ENTRIES, MOST_NAMES, MOST_FILES = 1_000_000, 20_000, 256
MOST_PER_USER = 1000  # waiting reports of one user, for all nodes together
KEEP_S = 86_400.0  # a report that no node has taken by then is removed
_WRITING_S = 3600.0  # a hidden file younger than this may still be written


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's report. ``node``: Slurm's name of it."""

    node: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
    why: Annotated[str, msgspec.Meta(max_length=2000)]
    v: int = 1


class Taken(msgspec.Struct, frozen=True):
    """A report on this node. ``user``: the number of the file's owner; ``why``: on one line, safe to print."""

    user: int
    why: str


class Sweep(msgspec.Struct, frozen=True):
    """The result of one look into the spool. ``refused``: the first files that were no report, as text."""

    taken: tuple[Taken, ...] = ()
    refused: tuple[str, ...] = ()


def write(spool: Path, report: Report) -> str:
    """Write a report; return the file's name. Raises UsageError where no spool exists, or it cannot take the report."""
    name = f"report-{secrets.token_hex(8)}"
    hidden = spool / f".{name}"
    try:
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(report))
        hidden.rename(spool / name)
    except FileNotFoundError:
        raise UsageError(f"there is no {spool}: no daemon takes reports on this node (--spool names another)") from None
    except OSError as error:
        raise UsageError(f"the report could not be left in {spool}: {error.strerror}") from None
    return name


def prepare(spool: Path) -> None:
    """Make the spool. Raises HealthError where that fails, or it is not root's own."""
    try:
        spool.parent.mkdir(0o755, parents=True, exist_ok=True)
        if not spool.exists():
            spool.mkdir(0o700)
            spool.chmod(MODE)
        os.close(_opened(spool))
    except OSError as error:
        raise HealthError(f"reports cannot be taken in {spool}: {error.strerror}") from error


def take(spool: Path, node: str, now: float) -> Sweep:
    """Read and remove the reports on ``node``, and files that are no report. ``now``: Unix seconds.

    Raises HealthError.

    Reports on other nodes stay for those (a spool may be shared), for a day.
    """
    try:
        folder = _opened(spool)
    except OSError as error:
        raise HealthError(f"reports cannot be read in {spool}: {error.strerror}") from error
    try:
        taken: list[Taken] = []
        refused: list[str] = []
        for name in _names(folder):
            try:
                found = _read(folder, name, now)
            except _NoReport as error:
                refused.append(printable(f"{name!a}: {error}", 200))
                _remove(folder, name)
                continue
            if found is not None and found.report.node == node:
                taken.append(Taken(found.user, printable(" ".join(found.report.why.split()))))
            if found is not None and (found.report.node == node or abs(now - found.written) > KEEP_S):
                _remove(folder, name)
        return Sweep(tuple(taken), tuple(refused[:5]))
    except OSError as error:
        raise HealthError(f"reports cannot be read in {spool}: {error.strerror}") from error
    finally:
        os.close(folder)


class _NoReport(Exception):
    """Raised for a file that is no report of a node."""


@dataclass(frozen=True)
class _Found:
    report: Report
    user: int
    written: float


def _opened(spool: Path) -> int:
    """Return the directory's descriptor; it is root's, and users cannot change each other's files in it.

    Raises OSError.
    """
    fd = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    open_to_others = status.st_mode & 0o022
    if status.st_uid != os.geteuid() or (open_to_others and not status.st_mode & stat.S_ISVTX):
        os.close(fd)
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid} with mode {status.st_mode & 0o7777:o}")
    return fd


def _names(folder: int) -> list[str]:
    """Return at most MOST_FILES names, of all users in turn, so that no user delays another's reports.

    A user's files beyond MOST_PER_USER are removed. Directories are ignored.
    """
    of_users: dict[int, list[str]] = {}
    with os.scandir(folder) as entries:
        files = (entry for entry, _ in zip(entries, range(MOST_ENTRIES), strict=False) if not _is_directory(entry))
        for entry in itertools.islice(files, MOST_NAMES):
            with contextlib.suppress(OSError):  # it is gone by now
                of_users.setdefault(entry.stat(follow_symlinks=False).st_uid, []).append(entry.name)
    for user, names in of_users.items():
        random.shuffle(names)  # each gets its turn, whatever its name
        if user != os.geteuid():
            for name in names[MOST_PER_USER:]:
                _remove(folder, name)
            del names[MOST_PER_USER:]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*of_users.values()))
    return list(itertools.islice((name for name in in_turn if name is not None), MOST_FILES))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _read(folder: int, name: str, now: float) -> _Found | None:
    """Return the report; None for a file that is still being written, or gone. Raises _NoReport."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise _NoReport("not a regular file")
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _NoReport(error.strerror) from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)  # of the opened file, whatever the name means by now
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise _NoReport(f"not a regular file with one name (user {status.st_uid})")
        # the time of the inode's last change: no user can set it, as mtime can be
        if name.startswith(".") and abs(now - status.st_ctime) < _WRITING_S:
            return None
        if status.st_size > MOST_BYTES:
            raise _NoReport(f"{status.st_size} bytes (user {status.st_uid})")
        content = file.read(MOST_BYTES)
    try:
        report = msgspec.json.decode(content, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _NoReport(f"not understood (user {status.st_uid})") from None
    return _Found(report, status.st_uid, status.st_ctime)


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:  # gone, or exchanged for a directory meanwhile: the next look sees it
        return
