"""Removes what killed launches left on a node: their private directories, and processes that outlived them.

Directories of a run on a node outlive its agent, for the next agent. An agent holds a lock in each of its directories
(private, /tmp and /dev/shm) and touches it now and then. When it is killed, the kernel drops the lock and the next
agent takes it. A directory whose lock is free and was not touched for ``ABANDONED_S`` belonged to a launch that was
killed as a whole. The lock's file says whose it is, so a launch whose launcher ran on this machine is known to be dead
at once.

Each new agent sweeps, and so does ``resilio clean``. A directory is renamed before it is removed, with its lock held.
So no agent can take it meanwhile, and the next sweep finishes an interrupted removal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from resilio_hpc.core import trusted_files
from resilio_hpc.launch.process import lost_processes
from resilio_hpc.launch.process.lost_processes import LostProcess
from resilio_hpc.launch.rundir import holder, node_directories
from resilio_hpc.launch.rundir.directory_locks import LOCK, TOUCH_S, DirectoryClaim, is_at

ABANDONED_S = 300.0
_REMOVED = "removed-"
IN_USE = "a launch uses it"
_BEFORE_LOCK = ("identity.json", ".identity.json.")  # what an agent writes before it takes its lock
_MOST_BYTES = 1 << 16


# -- what is left ------------------------------------------------------------------------------------------------------


class PrivateDirectory(Struct):
    """A directory of a launch of this user. ``kept``: why it stays, "" where it is abandoned; then ``lock`` is held."""

    path: Path
    label: str
    kept: str = ""
    idle_s: float = 0.0
    size_bytes: int = 0
    claim: DirectoryClaim = field(default_factory=DirectoryClaim)
    lock: int = -1


class DeadLaunch(Struct):
    """What one launch, or its launcher, left here.

    ``kept``: why all of it stays; ``failed``: what could not be removed, and why.
    """

    directories: list[PrivateDirectory]
    kept: str = ""
    processes: list[LostProcess] = field(default_factory=list)
    segments: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def claim(self) -> DirectoryClaim:
        """Return whose it was, as far as known."""
        return next((one.claim for one in self.directories if one.claim.run_id), DirectoryClaim())

    @property
    def idle_s(self) -> float:
        """Return since when nothing of it has moved."""
        return min(one.idle_s for one in self.directories)


def clean(
    bases: Sequence[Path], abandoned_s: float = ABANDONED_S, dry_run: bool = False, sizes: bool = True
) -> list[DeadLaunch]:
    """Remove what killed launches of this user left in ``bases``; return all that is there, and why some of it stays.

    ``abandoned_s``: for how long nothing must have moved; below ``ABANDONED_S`` only launches go that are known to be
    dead. ``sizes``: measure. Raises nothing.
    """
    looked = [_look(path, abandoned_s) for base in bases for path in _candidates(base)]
    found = [one for one in looked if one is not None]
    launches = []
    try:
        for directories in _grouped(found):
            held = [one for one in directories if one.kept == IN_USE]
            launch = DeadLaunch(directories, next((one.kept for one in (*held, *directories) if one.kept), ""))
            launches.append(launch)
            if sizes:
                for one in directories:
                    one.size_bytes = _size(one.path)
            if not launch.kept:
                _end(launch, dry_run)
    finally:
        for one in found:
            if one.lock >= 0:
                os.close(one.lock)
                one.lock = -1
    return launches


def sweep(bases: Sequence[Path], abandoned_s: float = ABANDONED_S) -> list[Path]:
    """Remove what killed launches of this user left in ``bases``; return the directories that were removed."""
    swept = [one for one in clean(bases, abandoned_s, sizes=False) if not one.kept]
    return [each.path for one in swept for each in one.directories if not each.path.exists()]


def remove(path: Path) -> None:
    """Remove a directory of this user as far as possible; another user's stays. Raises nothing."""
    if trusted_files.is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def _candidates(base: Path) -> list[Path]:
    try:
        found = sorted(base.glob(f"{node_directories.prefix()}*"))
    except OSError:
        return []
    return [path for path in found if trusted_files.is_own(path)]


def _grouped(found: Sequence[PrivateDirectory]) -> Iterator[list[PrivateDirectory]]:
    """Yield the directories of each launch on this node: their names have the same label."""
    labels = dict.fromkeys(one.label for one in found if one.label)
    for label in labels:
        yield [one for one in found if one.label == label]
    yield from ([one] for one in found if not one.label)


def _look(path: Path, abandoned_s: float) -> PrivateDirectory | None:
    """Judge a directory, and lock it if it is abandoned. None: it is gone."""
    one = PrivateDirectory(path, node_directories.label_in(path.name))
    try:
        one.idle_s = time.time() - path.lstat().st_mtime
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return _without_lock(one, abandoned_s)
    except OSError as error:
        one.kept = f"its lock cannot be opened: {error.strerror}"
        return one
    try:
        one.kept = _why_kept(one, lock, abandoned_s)
        if not one.kept:
            one.lock = lock
    finally:
        if one.lock < 0:
            os.close(lock)
    return one


def _without_lock(one: PrivateDirectory, abandoned_s: float) -> PrivateDirectory | None:
    """Judge one whose launch was killed before it could take a lock, if a launch made it at all."""
    try:
        names = os.listdir(one.path)  # noqa: PTH208 - names alone
    except OSError:
        return None
    if not all(name.startswith(_BEFORE_LOCK) for name in names) and not _was_begun(one.path):
        one.kept = "it has no lock of a launch"
    elif one.idle_s <= max(abandoned_s, ABANDONED_S):
        one.kept = _too_young(ABANDONED_S)
    return one


def _was_begun(path: Path) -> bool:
    return path.name.startswith(f"{node_directories.prefix()}{_REMOVED}")


def _why_kept(one: PrivateDirectory, lock: int, abandoned_s: float) -> str:
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return "its lock is no file of this user"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return IN_USE
    if not is_at(lock, one.path / LOCK):
        return IN_USE  # another clean removes it
    one.idle_s = time.time() - os.fstat(lock).st_mtime
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        one.claim = msgspec.json.decode(os.pread(lock, _MOST_BYTES, 0), type=DirectoryClaim)
    if one.idle_s <= abandoned_s:
        return _too_young(abandoned_s)
    alive = holder.lives(one.claim.launcher, holder.kernel_here())
    if alive:  # it is stopped, or starts its agent soon; a launcher on another machine is not known here
        return "its launcher lives"
    return "" if alive is False or one.idle_s > ABANDONED_S else _too_young(ABANDONED_S)


def _too_young(limit_s: float) -> str:
    return f"its launch may go on; it counts as dead after {limit_s:g} s"


# -- the end -----------------------------------------------------------------------------------------------------------


def _end(launch: DeadLaunch, dry_run: bool) -> None:
    """End a dead launch's processes and remove its directories, whose locks are held."""
    label = launch.directories[0].label
    if label:

        def of_token(token: str) -> bool:
            run_id, _, node = token.partition(":")
            return node_directories.label_of(run_id, node) == label

        if dry_run:
            launch.processes = lost_processes.lost(of_token)
        else:
            died = time.time() - launch.idle_s + TOUCH_S
            launch.processes, launch.segments = lost_processes.end(of_token, died)
    if not dry_run:
        for one in launch.directories:
            _remove_locked(one, launch.failed)


def _remove_locked(one: PrivateDirectory, failed: list[str]) -> None:
    hidden = one.path.with_name(f"{node_directories.prefix()}{_REMOVED}{secrets.token_hex(4)}")
    try:
        one.path.rename(hidden)
    except OSError as error:
        failed.append(f"{one.path}: {error.strerror}")
        return
    problems: list[str] = []
    shutil.rmtree(hidden, onerror=lambda _call, path, info: problems.append(f"{path}: {info[1]}"))
    if hidden.exists():
        failed.extend(problems[:1] or [f"{hidden}: it is still there"])


def _size(path: Path) -> int:
    """Return the bytes on disk, or in memory, below a directory; what cannot be read counts as none."""
    total, folders = 0, [path]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                total += status.st_blocks * 512
                if stat.S_ISDIR(status.st_mode):
                    folders.append(Path(entry.path))
    return total
