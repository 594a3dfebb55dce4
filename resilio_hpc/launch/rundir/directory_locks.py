"""The locks of a node's private directories: whose they are, and that a launch uses them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilio_hpc.launch.rundir import holder, node_directories
from resilio_hpc.launch.rundir.holder import Holder

LOCK = "held"
TOUCH_S = 30.0
_TRIES = 5


class DirectoryClaim(msgspec.Struct, frozen=True):
    """Whose directory it is, in the file of its lock. ``launcher``: the process of the launch, if on this machine."""

    run_id: str = ""
    node: str = ""
    launcher: Holder = Holder()
    v: int = 1


class AgentLocks:
    """The locks of one agent. Children do not inherit the descriptors, so the locks end with this process."""

    def __init__(self, directories: Sequence[Path], wait_s: float = 0.0, claim: DirectoryClaim | None = None) -> None:
        """Take the locks.

        Raises BlockingIOError where another agent has one, FileNotFoundError where a directory is removed just then.
        """
        self._locks: list[int] = []
        try:
            for path in directories:
                self._locks.append(os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            deadline = time.monotonic() + wait_s  # a killed agent may take a moment to die
            for lock, path in zip(self._locks, directories, strict=True):
                while not _locked(lock, last_try=time.monotonic() >= deadline):
                    time.sleep(0.05)
                if not is_at(lock, path / LOCK):
                    raise FileNotFoundError(path)
                _write_claim(lock, claim or DirectoryClaim())
        except BaseException:
            for lock in self._locks:
                os.close(lock)
            raise
        self._next_touch = 0.0

    def tick(self) -> None:
        """Touch the locks when it is due."""
        if time.monotonic() >= self._next_touch:
            self._next_touch = time.monotonic() + TOUCH_S
            for lock in self._locks:
                os.utime(lock)


def claim_of(run_id: str, node: str, launcher_pid: int) -> DirectoryClaim:
    """Return the claim of an agent; ``launcher_pid``: its launcher's, 0 where that is on another machine."""
    if not launcher_pid:
        return DirectoryClaim(run_id, node)
    launcher = Holder(pid=launcher_pid, kernel=holder.kernel_here(), born=holder.born(launcher_pid) or 0)
    return DirectoryClaim(run_id, node, launcher)


def take(run_id: str, node: str, wait_s: float, launcher_pid: int) -> tuple[Path, Path, AgentLocks]:
    """Return an agent's directories (sockets and spool, snapshots), made if they are missing, and its locks.

    Raises BlockingIOError where another agent has them, UsageError.
    """
    claim = claim_of(run_id, node, launcher_pid)
    for tries_left in reversed(range(_TRIES)):
        try:
            local, arenas = node_directories.local(run_id, node), node_directories.arenas(run_id, node)
            return local, arenas, AgentLocks([local, arenas], wait_s, claim)
        except FileNotFoundError:  # what was found there is removed just now
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _locked(lock: int, last_try: bool) -> bool:
    """Take a lock if it is free. Raises BlockingIOError at the last try, when another agent runs here."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last_try:
            raise
        return False
    return True


def is_at(lock: int, path: Path) -> bool:
    """Return whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(lock), path.lstat())
    except OSError:
        return False


def _write_claim(lock: int, claim: DirectoryClaim) -> None:
    with contextlib.suppress(OSError):  # a full disk: it is then known by its lock alone
        data = msgspec.json.encode(claim)
        os.ftruncate(lock, 0)
        os.pwrite(lock, data, 0)
