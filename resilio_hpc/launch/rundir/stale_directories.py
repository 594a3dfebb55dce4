"""Removes directories that killed launches left on a node.

Directories of a run on a node outlive its agent, for the next agent. An agent holds a lock in each of its directories
(private, /tmp and /dev/shm) and touches it now and then. When it is killed, the kernel drops the lock and the next
agent takes it. A directory whose lock is free and was not touched for ``ABANDONED_S`` belonged to a launch that was
killed as a whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.core import trusted_files

LOCK = "held"
TOUCH_S = 30.0
ABANDONED_S = 300.0


class AgentLocks:
    """The locks of one agent. Children do not inherit the descriptors, so the locks end with this process."""

    def __init__(self, directories: Sequence[Path], wait_s: float = 0.0) -> None:
        self._locks = [os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in directories]
        deadline = time.monotonic() + wait_s  # a killed agent may take a moment to die
        for lock in self._locks:
            while not _locked(lock, last_try=time.monotonic() >= deadline):
                time.sleep(0.05)
        self._next_touch = 0.0

    def tick(self) -> None:
        """Touch the locks when it is due."""
        if time.monotonic() >= self._next_touch:
            self._next_touch = time.monotonic() + TOUCH_S
            for lock in self._locks:
                os.utime(lock)


def _locked(lock: int, last_try: bool) -> bool:
    """Take a lock if it is free. Raises BlockingIOError at the last try, when another agent runs here."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last_try:
            raise
        return False
    return True


def sweep(bases: Sequence[Path], abandoned_s: float = ABANDONED_S) -> list[Path]:
    """Remove what this user's killed launches left below ``bases``; return what was removed."""
    found = [path for base in bases for path in base.glob(f"resilio-{os.geteuid()}-*")]
    removed = [path for path in found if trusted_files.is_own(path) and _abandoned(path, abandoned_s)]
    for path in removed:
        remove(path)
    return removed


def remove(path: Path) -> None:
    """Remove a directory of this user as far as possible; another user's stays. Raises nothing."""
    if trusted_files.is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path, abandoned_s: float) -> bool:
    try:
        status = path.lstat()
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed before it could take a lock
        return time.time() - status.st_mtime > abandoned_s
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(lock).st_mtime > abandoned_s
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
