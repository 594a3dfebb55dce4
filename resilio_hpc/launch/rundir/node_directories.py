"""This node's private directories of a run.

Sockets and spool are in ``RESILIO_LOCAL_DIR`` or ``/tmp``, snapshots in ``/dev/shm``. Every user may create names
there. So a directory's name ends in a random part, and directories of other users are ignored. An agent finds an
earlier agent's directories by the rest of the name, among this user's own: ``resilio-UID-RUN-RANDOM``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import Untrusted, UsageError, os_error_text

VARIABLE = "RESILIO_LOCAL_DIR"
SHARED_MEMORY = Path("/dev/shm")
_SOCKET_PATH_BYTES = 107  # unix(7), without the NUL
_LONGEST_SOCKET = "agent.sock"
_RANDOM_CHARACTERS = 8  # of tempfile.mkdtemp
_LABELLED = re.compile(r"resilio-\d+-([0-9a-f]{12})-.+")
_LOCK_S = 1.0  # for another agent of this user that looks for its directories just then


def local_base() -> Path:
    """Return where private directories are made that are not in memory. Raises UsageError."""
    return directory_path(os.environ.get(VARIABLE) or "/tmp", VARIABLE)


def local(run_id: str, node: str) -> Path:
    """Return the directory of sockets and spool; make it if it is missing. Raises UsageError."""
    base, label = local_base(), _label(run_id, node)
    longest = base / f"{_prefix(label)}{_RANDOM_CHARACTERS * 'x'}" / _LONGEST_SOCKET
    over = len(os.fsencode(longest)) - _SOCKET_PATH_BYTES
    if over > 0:
        raise UsageError(f"{VARIABLE}={base} is {over} bytes too long for a socket in it: choose a shorter one")
    return _settled(base, label)


def arenas(run_id: str, node: str) -> Path:
    """Return the directory of snapshots; make it if it is missing. Raises UsageError."""
    return _settled(SHARED_MEMORY, _label(run_id, node))


def found(run_id: str, node: str) -> tuple[Path | None, Path | None]:
    """Return the existing (sockets and spool, snapshots), None for each that is missing."""
    return _found(local_base(), _label(run_id, node)), _found(SHARED_MEMORY, _label(run_id, node))


def make(base: Path, label: str = "") -> Path:
    """Make a new private directory, of mode 0700. Raises UsageError."""
    check_base(base)
    try:
        return Path(tempfile.mkdtemp(prefix=_prefix(label), dir=base))
    except OSError as error:
        raise UsageError(f"no private directory can be made: {os_error_text(error, str(base))}") from None


def check_base(base: Path) -> None:
    """Make ``base`` if it is missing. Raise UsageError where other users can rename in it what is this user's."""
    try:
        base.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{VARIABLE}: {os_error_text(error, str(base))}") from None
    check_existing_base(base, f"set {VARIABLE} to a directory of your own")


def check_existing_base(base: Path, advice: str) -> None:
    """Raise UsageError for a directory in which other users can rename what is this user's."""
    try:
        status = base.stat()
    except OSError as error:
        raise UsageError(f"{VARIABLE}: {os_error_text(error, str(base))}") from None
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{base} belongs to user {status.st_uid}: {advice}")
    if status.st_mode & trusted_files.OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise Untrusted(f"other users can rename what is in {base}, which has no sticky bit: {advice}")


def label_of(run_id: str, node: str) -> str:
    """Return what the names of a run's directories on a node have in common. Pure."""
    return hashlib.sha256(f"{run_id}:{node}".encode()).hexdigest()[:12]


def label_in(name: str) -> str:
    """Return the label in a directory's name; "" where it has none. Pure."""
    found = _LABELLED.fullmatch(name)
    return found[1] if found else ""


def prefix() -> str:
    """Return what the names of all private directories of this user begin with."""
    return f"resilio-{os.geteuid()}-"


def _label(run_id: str, node: str) -> str:
    return label_of(run_id, node) + "-"


def _prefix(label: str) -> str:
    return prefix() + label


def _found(base: Path, label: str) -> Path | None:
    """Return this user's first one, so that all agents of the node take the same."""
    return next((path for path in sorted(base.glob(f"{_prefix(label)}*")) if trusted_files.is_own(path)), None)


def _settled(base: Path, label: str) -> Path:
    check_base(base)
    with _alone(base):
        path = _found(base, label) or make(base, label)
    fd = trusted_files.open_directory(path)
    try:
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


@contextmanager
def _alone(base: Path) -> Iterator[None]:
    """Keep other agents of this user from making the same directory twice.

    Another user may hold the lock for ever, so the wait for it is bounded.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            deadline = time.monotonic() + _LOCK_S
            while not _locked(fd) and time.monotonic() < deadline:
                time.sleep(0.01)
        yield


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
