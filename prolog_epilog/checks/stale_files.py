"""Files that former jobs left in /dev/shm, /tmp and the burst buffer, of users with no process here."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.prolog_epilog.base.check import Absent, Fault, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.base.probe import Source

_MOST_FILES, _WALK_S = 200_000, 4.0
_UID = re.compile(r"^Uid:\s+\d+\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class StaleFiles:
    """By user: bytes on disk below ``path``. ``cut``: there are more than were counted."""

    path: str
    bytes_by_user: dict[int, int]
    active_users: frozenset[int]
    cut: bool = False


def place(kind: str) -> Source:
    """Return the fetcher for one kind of place, named in the settings; each place has its own child."""

    def fetch(node: NodeView) -> StaleFiles:
        top = node.files.path(node.target)
        if not top.is_dir():
            raise Absent(f"{node.target} is not there")
        sizes: dict[int, int] = {}
        cut = _counted(top, sizes)
        least = node.settings["leftovers"].number("least_user")
        ordinary = {user: size for user, size in sizes.items() if user >= least}
        return StaleFiles(node.target, ordinary, active_users(node.files), cut)

    return Source(fetch, lambda node: node.settings["leftovers"].texts(kind))


def active_users(files: NodeFiles) -> frozenset[int]:
    """Return users who have a process here. Raises Unreadable."""
    found = set()
    for pid in files.names("/proc", r"\d+"):
        match = _UID.search(files.optional(f"/proc/{pid}/status") or "")
        if match:
            found.add(int(match[1]))
    if not found:
        raise Unreadable("/proc shows no process")
    return frozenset(found)


def _counted(top: Path, sizes: dict[int, int]) -> bool:
    """Add up the files below, on this file system only, without links; return whether there were too many."""
    until = time.monotonic() + _WALK_S
    device = os.lstat(top).st_dev
    folders, files = [top], 0
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    sizes[status.st_uid] = sizes.get(status.st_uid, 0) + status.st_blocks * 512
                    files += 1
                    if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                        folders.append(Path(entry.path))
        except OSError:
            continue  # it vanished meanwhile, or may not be read
        if files > _MOST_FILES or time.monotonic() > until:
            return True
    return False


def large(stale: StaleFiles, limits: Thresholds) -> Iterable[Fault]:
    """Yield much data of users who run nothing here."""
    idle = {user: size for user, size in stale.bytes_by_user.items() if user not in stale.active_users}
    mib = sum(idle.values()) / 2**20
    if mib > limits.number("most_mib"):
        worst = max(idle, key=lambda user: idle[user])
        more = " or more" if stale.cut else ""
        yield Fault(
            f"{stale.path}: {mib:.0f} MiB{more} of users who run nothing here, most of user {worst}", stale.path
        )
