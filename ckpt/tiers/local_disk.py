"""A node's own disk (NVMe) between its memory and the shared file system: copies of the shard files written last.

Nothing counts because it is here: a copy is read only when a committed manifest names its content. ``disk_layout`` says
what lies where.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from resilio_hpc.ckpt.format.manifest import Manifest, is_shard_name
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers import bounded_io
from resilio_hpc.ckpt.tiers.bounded_io import PATIENCE, Patience
from resilio_hpc.ckpt.tiers.disk_layout import (
    HELD,
    STEP,
    check_directory,
    holder_directory,
    holders,
    is_private,
    prefix,
    step_name,
)
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import make_directory, sync_directory
from resilio_hpc.core.errors import CheckpointError, os_error_text
from resilio_hpc.core.file_system import is_in_memory
from resilio_hpc.core.memory_left import refuse_to_fill_memory

ABANDONED_S = 86_400.0
"""A directory that no process has written to for so long belongs to a run that is over, or has moved to other nodes."""

FULL = (errno.ENOSPC, errno.EDQUOT)
_SWEEPER = "resilio-local-sweep"
_YOURS = "choose a directory that is yours alone"
_ADVICE = {
    **dict.fromkeys(FULL, "make room there for two steps of this node"),
    errno.ENOMEM: "choose a directory on a disk, that one lies in memory",
    errno.ENOENT: "make that directory, on every node",
    errno.EPERM: _YOURS,
    errno.EACCES: _YOURS,
}


def advice(error: OSError) -> str:
    """Return what the user can do about an error of such a disk."""
    return _ADVICE.get(error.errno or 0, "have that disk looked at, or choose another directory")


class LocalDisk:
    """The directory of one holder, locked until ``close``. Methods raise OSError for errors of the disk."""

    def __init__(self, directory: Path, checkpoints: Path, holder: str, patience: Patience = PATIENCE) -> None:
        """Lock a directory; ``directory``: DIR.

        ``checkpoints``: where steps are committed. ``holder``: the node, or the process where each writes its own file.
        """
        self._checkpoints = checkpoints
        self._path = holder_directory(directory, checkpoints, holder)
        self.recycled = self._path / "worn"
        """Files that the next step may write over, if there are any."""
        check_directory(directory)
        self._lock = self._take(patience.lock_s)
        try:
            if not os.fstat(self._lock).st_size:
                os.pwrite(self._lock, os.fsencode(f"{checkpoints}\n"), 0)
            os.utime(self._lock)
        except BaseException:
            self.close()
            raise
        if not any(thread.name == _SWEEPER for thread in threading.enumerate()):  # one may hang with a file system
            threading.Thread(target=sweep, args=(directory,), name=_SWEEPER, daemon=True).start()

    def _take(self, patience_s: float) -> int:
        deadline = time.monotonic() + patience_s
        while True:
            make_directory(self._path, 0o700)
            if not is_private(self._path):
                raise PermissionError(errno.EPERM, f"{self._path.name} is not yours alone", str(self._path))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(self._path / HELD, flags, 0o600)
            try:
                regular_file.check_regular(lock, self._path / HELD)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(lock, self._path / HELD):
                    return lock
            except regular_file.NotRegular:
                os.close(lock)
                raise
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise OSError(errno.EBUSY, "another process writes there", str(self._path)) from error
            os.close(lock)  # another process just removed it, or unlocks it soon
            time.sleep(0.05)

    def new_step(self, step: int, epoch: int, round_: int, size_bytes: int, keep: int = 1) -> Path:
        """Return an empty directory for a step.

        All others are removed, except the ``keep`` committed last of those here. The file of a removed one stays in
        ``recycled``, to be overwritten. ``size_bytes``: of what will be written; a directory in memory is refused where
        that is short.
        """
        new = self._path / step_name(step, epoch, round_)
        orders = {path: self._order(path) for path in self._path.iterdir() if path not in (new, self._path / HELD)}
        committed = sorted((path for path in orders if orders[path] >= 0), key=orders.__getitem__)
        kept = committed[-keep:]
        gone = [path for path in [new, *orders] if path not in kept]
        former = next((path for path in gone if STEP.fullmatch(path.name) and is_private(path)), None)
        for path in gone:
            if path != former:
                regular_file.remove(path)
        if former is not None:
            try:
                former.rename(self.recycled)
            except OSError:  # the former content could not be removed
                regular_file.remove(former)
            sync_directory(self._path)  # before it is overwritten
        if is_in_memory(self._lock):
            refuse_to_fill_memory(size_bytes)
        make_directory(new, 0o700)
        return new

    def drop_recycled(self) -> None:
        """Remove the other recycled files: this step has taken what it could use."""
        regular_file.remove(self.recycled)

    def _order(self, path: Path) -> int:
        """Return the order of its commit; -1 when it may not be committed, or not whole."""
        name = STEP.fullmatch(path.name)
        if name is None or not is_private(path):
            return -1
        step, epoch, round_ = (int(number) for number in name.groups())
        try:
            manifest = checkpoint_index.manifest_of(self._checkpoints, step)
        except (CheckpointError, OSError):
            return -1
        files = {file.name for file in path.iterdir()}
        is_whole = files and files <= {shard.file for shard in manifest.shards}
        return manifest.order if is_whole and (manifest.epoch, manifest.round) == (epoch, round_) else -1

    def try_out(self) -> None:
        """Read and write something small on that disk. Raises OSError; may hang with it."""
        bounded_io.read_page(self._path / HELD)
        fd = regular_file.open_file(self._path / HELD, os.O_WRONLY)
        try:
            os.utime(fd)
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unlock it."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def copies(directory: Path, checkpoints: Path, manifest: Manifest) -> Mapping[str, Path]:
    """Return the copies of a committed step's shard files on this machine, by name, unverified.

    Raises OSError; FileNotFoundError where DIR does not exist.
    """
    check_directory(directory)
    name = step_name(manifest.step, manifest.epoch, manifest.round)
    files = {shard.file for shard in manifest.shards}
    found = {}
    for path in holders(directory, prefix(checkpoints)):
        if is_private(path / name):
            found.update({file.name: path / name for file in (path / name).iterdir() if file.name in files})
    return found


def copy_of(directory: Path, checkpoints: Path, step: int, epoch: int, round_: int, file: str) -> Path | None:
    """Return the copy of one shard file on this machine, for any caller. Raises OSError."""
    check_directory(directory)
    if not is_shard_name(file):
        return None
    for path in holders(directory, prefix(checkpoints)):
        found = path / step_name(step, epoch, round_)
        if is_private(found) and (found / file).is_file():
            return found / file
    return None


def answering_copies(
    directory: Path, checkpoints: Path, manifest: Manifest, patience: Patience = PATIENCE
) -> Mapping[str, Path]:
    """Return ``copies``, if that disk still reads; TimeoutError where it does not in time."""

    def look() -> Mapping[str, Path]:
        found = copies(directory, checkpoints, manifest)
        for name, where in found.items():
            with contextlib.suppress(OSError):  # an answer; its meaning is for the file's reader
                bounded_io.read_page(where / name)
        return found

    return bounded_io.in_time(look, patience)


def copies_or_none(
    directory: Path | None,
    checkpoints: Path,
    manifest: Manifest,
    say: Callable[[str], None],
    patience: Patience = PATIENCE,
) -> Mapping[str, Path]:
    """Return ``answering_copies``; none without such a disk, or where it fails, which is reported."""
    try:
        return {} if directory is None else answering_copies(directory, checkpoints, manifest, patience)
    except FileNotFoundError:
        return {}  # the node never had any
    except OSError as error:
        say(f"{os_error_text(error, str(directory))}: {checkpoints} is read instead")
        return {}


def sweep(directory: Path, abandoned_s: float = ABANDONED_S) -> None:
    """Remove what this user's runs left in DIR.

    No process writes there, and it is old or its checkpoint directory is gone. May hang with the file system of such a
    directory.
    """
    with contextlib.suppress(OSError):
        for path in holders(directory, prefix()):
            with contextlib.suppress(OSError):
                _sweep(path, abandoned_s)


def _sweep(path: Path, abandoned_s: float) -> None:
    try:
        lock = regular_file.open_file(path / HELD, os.O_RDWR)
    except FileNotFoundError:  # killed before it could take the lock
        if time.time() - path.stat().st_mtime > abandoned_s:
            regular_file.remove(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checkpoints = os.fsdecode(os.pread(lock, 1 << 16, 0))
        if time.time() - os.fstat(lock).st_mtime > abandoned_s or (
            checkpoints.endswith("\n") and _is_gone(checkpoints[:-1])
        ):
            regular_file.remove(path)
    finally:
        os.close(lock)


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _is_gone(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False
