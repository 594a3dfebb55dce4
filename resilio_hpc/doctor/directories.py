"""The run directory, a node's own disk, and the local directory: places that a launch writes to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import durable, file_system
from resilio_hpc.core.errors import ResilioError, UsageError, os_error_text
from resilio_hpc.core.trusted_files import OTHERS_WRITE
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, not_here, notice, ok, warning
from resilio_hpc.launch.cli.checks import check_directory
from resilio_hpc.launch.rundir import node_directories

_SLOW_S = 2.0
_LITTLE_BYTES = 1 << 30
_FEW_FILES = 1000


@dataclass(frozen=True)
class _Room:
    """The room of a file system; None where it has no limit."""

    free_bytes: int | None
    files: int | None

    @classmethod
    def of(cls, path: Path) -> _Room:
        seen = os.statvfs(path)
        free = seen.f_bavail * seen.f_frsize if seen.f_blocks else None
        return cls(free, seen.f_favail if seen.f_files else None)

    def __str__(self) -> str:
        return "of no fixed size" if self.free_bytes is None else f"{self.free_bytes / (1 << 30):.3g} GiB free"

    def is_below(self, least_bytes: int, files: int = 1) -> bool:
        """Return whether there is less."""
        few = self.files is not None and self.files < files
        return few or (self.free_bytes is not None and self.free_bytes < least_bytes)


def run_directory(view: DoctorView) -> DoctorFinding:
    """Use the run directory, or the one above it that exists, as a launch does; remove all of it again."""
    view.mark(str(view.run_dir))
    try:
        check_directory("--run-dir", view.run_dir)
    except UsageError as error:
        return failed(str(error), "resilio-launch refuses it.", "name a directory that you can write to: --run-dir DIR")
    place = _existing(view.run_dir)
    owner = _owner(view.run_dir) if place == view.run_dir else None
    if owner is not None:
        return owner
    room = _Room.of(place)
    seen = f"{place}, {_kind(place, view)}, {room}"
    if full := _full(seen, room):
        return full
    began = time.monotonic()
    try:
        _use(place)
    except (OSError, ResilioError) as error:
        return _unusable(place, error)
    took = time.monotonic() - began
    if took > _SLOW_S:
        return warning(
            f"{seen}; a few small files took {took:.1f} s",
            "Commits, logs and the start of a job are as slow. Steps and restarts from memory are not.",
            "ask who else loads this file system, or choose another one: --run-dir DIR",
        )
    if room.is_below(_LITTLE_BYTES, _FEW_FILES):
        return warning(seen, "Checkpoints need room for several steps.", "make room there: resilio ckpt --help")
    if view.has_slurm and _is_local(place):
        return notice(
            f"{seen}, on this machine alone, as far as it can tell",
            "All nodes of a job must see the same run directory.",
            "choose one on the shared file system, unless this one is: --run-dir DIR",
        )
    return ok(seen)


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _owner(path: Path) -> DoctorFinding | None:
    """Return a finding where the launcher would refuse an existing run directory for its owner or mode."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return failed(
            f"{path} belongs to user {status.st_uid}",
            "What is in a run directory is executed, so no other user may write there.",
            "name a directory of your own: --run-dir DIR",
        )
    if status.st_mode & OTHERS_WRITE and (status.st_uid != os.geteuid() or status.st_mode & stat.S_ISVTX):
        return failed(
            f"other users can write in {path} (mode {stat.S_IMODE(status.st_mode):o})",
            "What is in a run directory is executed, so no other user may write there.",
            f"name a new directory in it: --run-dir {path}/NAME",
        )
    return None


def _kind(path: Path, view: DoctorView) -> str:
    from resilio_hpc.prolog_epilog.base import mounts

    found = mounts.mount_of(str(path.resolve()), mounts.parse_mountinfo(Path(mounts.MOUNTINFO).read_text()))
    return found.type if found else "an unknown file system"


def _is_local(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file_system.is_of_this_machine(fd)
    finally:
        os.close(fd)


def _full(seen: str, room: _Room) -> DoctorFinding | None:
    if room.is_below(1 << 20, 0):
        return failed(f"{seen}: it is full", "No run can begin there.", "make room there, or choose another directory")
    if room.files == 0:
        return failed(
            f"{seen}, but no more files", "No run can begin there.", "remove files there, or choose another directory"
        )
    return None


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".resilio-doctor-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Odd(ResilioError):
    """Raised for a file that is not as the file system was asked to make it."""


def _use(place: Path) -> None:
    """Write, lock, link, rename and read as a run does. Raises OSError, _Odd."""
    with _scratch(place) as scratch:
        if not durable.create_exclusive(scratch / "claim", b"one", 0o600):
            raise _Odd("a new name was there already")
        if durable.create_exclusive(scratch / "claim", b"two", 0o600):
            raise _Odd("the same name can be made twice")
        status = (scratch / "claim").stat()
        if status.st_mode & 0o077:
            raise _Odd("files cannot be closed to other users")
        if status.st_uid != os.geteuid():
            raise _Odd(f"new files belong to user {status.st_uid}, not to user {os.geteuid()}")
        durable.write_atomic(scratch / "claim", b"three")
        fd = os.open(scratch / "claim", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, b"+")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(fd, 10, 0) != b"three+":
                raise _Odd("a file has not the content that was written")
        finally:
            os.close(fd)


def _unusable(place: Path, error: Exception) -> DoctorFinding:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        what = "the quota is used up" if number == errno.EDQUOT else "it is full"
        return failed(f"{place}: {what}", "No run can begin there.", "make room there, or choose another directory")
    why = os_error_text(error, str(place)) if isinstance(error, OSError) else f"{place}: {error}"
    return failed(
        f"it does not do what a run needs: {why}",
        "A run claims names by hard links, replaces files by rename, locks some, and closes its secret to others.",
        "choose another file system, or mount this one with hard links, locks and owners: --run-dir DIR",
    )


def direct_io(view: DoctorView) -> DoctorFinding:
    """Write past the page cache in the run directory, as checkpoints are written."""
    from resilio_hpc.ckpt.format import bulk_io

    view.mark(str(view.run_dir))
    place = _existing(view.run_dir)
    with _scratch(place) as scratch:
        fd = os.open(scratch / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            direct = bulk_io.is_direct(fd)
        finally:
            os.close(fd)
    if direct:
        return ok(f"{_kind(place, view)} takes it")
    return notice(
        f"{_kind(place, view)} refuses it",
        "Checkpoints go through the page cache: slower, and they push other files out of it.",
        "choose another file system for large checkpoints, or set direct_io where the file system has such an option",
    )


def local_directory(view: DoctorView) -> DoctorFinding:
    """Make a private directory with a socket in it where agents keep theirs."""
    base = node_directories.local_base()
    view.mark(str(base))
    todo = f"set {node_directories.VARIABLE} to a directory on a disk of this node"
    try:
        check_directory(node_directories.VARIABLE, base)
        place = _existing(base)
        if place == base:
            node_directories.check_base(base)
        room = _Room.of(place)
        if full := _full(str(base), room):
            return full
        path = _private(place)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path / "agent.sock"))
        finally:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, ResilioError) as error:
        why = os_error_text(error, str(base)) if isinstance(error, OSError) else str(error)
        return failed(f"no socket can be made there: {why}", "Agents keep sockets and logs there.", todo)
    if room.is_below(_LITTLE_BYTES):
        return warning(f"{base}, {room}", "The output of ranks waits there while the run directory hangs.", todo)
    return ok(f"{base}, {_kind(place, view)}, {room}")


def _private(base: Path) -> Path:
    """Make a directory whose name is as long as an agent's. Raises UsageError."""
    return node_directories.make(base, f"{secrets.token_hex(6)}-")


def local_checkpoints(view: DoctorView) -> DoctorFinding:
    """Use the directory of --local-checkpoints, by the rules of the checkpoint engine."""
    from resilio_hpc.ckpt.format import bulk_io
    from resilio_hpc.ckpt.tiers import disk_layout, local_disk

    base = view.local_checkpoints
    if base is None:
        return not_here("not asked for (--local-checkpoints DIR)")
    view.mark(str(base))
    try:
        disk_layout.check_directory(base)
        room = _Room.of(base)
        if full := _full(str(base), room):
            return full
        _use(base)
        with _scratch(base) as scratch:
            fd = os.open(scratch / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                direct, in_memory = bulk_io.is_direct(fd), file_system.is_in_memory(fd)
            finally:
                os.close(fd)
    except (OSError, ResilioError) as error:
        why = os_error_text(error, str(base)) if isinstance(error, OSError) else f"{base}: {error}"
        todo = local_disk.advice(error) if isinstance(error, OSError) else "choose another directory"
        return failed(f"it cannot be used: {why}", "Steps are written to the shared file system alone.", todo)
    seen = f"{base}, {_kind(base, view)}, {room}, direct I/O {'works' if direct else 'refused'}"
    if in_memory:
        return warning(
            f"{seen}; it is in memory",
            "Steps there take memory from training, and are lost with the node.",
            "choose a directory on a disk of this node",
        )
    if not _is_local(base):
        return notice(
            f"{seen}; perhaps no disk of this node",
            "A shared file system gains nothing here.",
            "choose a directory on a disk of this node",
        )
    return ok(seen)
