"""Segments of shared memory that a killed process tree leaves in /dev/shm, and no tracker removes.

Only names that libraries draw for the memory of live processes are looked at: a file with a name of the user's own may
be meant to outlive its maker. A segment belongs to the tree if one of its processes, when it is about to be killed,
maps it or has it open, and if it is no older than the tree.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
NAMES = (
    "psm_",  # multiprocessing.shared_memory
    "torch_",  # torch's sharing strategy file_system
    "nccl-", "cuda.shm.",
    "vader_segment.", "sm_segment.", "osc_rdma.", "mpich_shar_tmp", "ucx_shm_posix_",  # Open MPI, MPICH, UCX
    "sem.mp-", "sem.loky-", "loky-",
)  # fmt: skip


def held(pids: Iterable[int], since: float, directory: Path = DIRECTORY) -> frozenset[Path]:
    """Return segments of this user that these processes hold, made or changed after ``since`` (Unix seconds)."""
    candidates = {str(path) for path in _segments(directory) if _is_ours(path, since)}
    found: set[str] = set()
    for pid in pids:
        if found == candidates:
            break
        found |= _held_by(pid, candidates)
    return frozenset(map(Path, found))


def remove(segments: Collection[Path]) -> list[Path]:
    """Remove and return the segments that no visible process of this machine holds any more."""
    names = {str(path) for path in segments if path.exists()}
    if names:
        for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
            if name.isdigit():
                names -= _held_by(int(name), names)
    removed = []
    for name in sorted(names):
        try:
            os.unlink(name)  # noqa: PTH108
            removed.append(Path(name))
        except OSError:
            continue
    return removed


def _segments(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.name.startswith(NAMES)]
    except OSError:
        return []


def _is_ours(path: Path, since: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_ctime >= since


def _held_by(pid: int, names: Collection[str]) -> set[str]:
    found = set()
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            found = {name for line in file if "/" in line and (name := line[line.index("/") :].rstrip("\n")) in names}
        descriptors = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - thousands of them
    except OSError:
        return found  # the process has ended, or belongs to another user
    for descriptor in descriptors:
        try:
            name = os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115 - as above
        except OSError:
            continue  # it was closed meanwhile; others may hold a segment all the same
        if name in names:
            found.add(name)
    return found
