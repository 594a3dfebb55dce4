"""How much memory this process may still use before the kernel kills a process of its job.

Shared memory counts: a file in /dev/shm that grows beyond a cgroup's limit is no error, but an out-of-memory kill.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LEAST_RESERVE_BYTES, _MOST_RESERVE_BYTES = 64 << 20, 4 << 30
"""What we leave to everybody else: a 32nd of the memory, within these bounds."""


class MemoryLeft(NamedTuple):
    """The free memory of the machine, or of the cgroup with the least. ``limit_bytes``: its limit."""

    left_bytes: int
    limit_bytes: int


def memory_left(root: Path = Path("/")) -> MemoryLeft | None:
    """Return the free memory by /proc and this process's memory cgroups (v1 and v2); None if unreadable."""
    found = [*_machine(root), *_cgroups(root)]
    return min(found, default=None)


def refuse_to_fill_memory(size: int) -> None:
    """Raise OSError (ENOMEM) when ``size`` more bytes would leave too little for other processes."""
    found = memory_left()
    if found is not None:
        reserve = min(max(found.limit_bytes // 32, _LEAST_RESERVE_BYTES), _MOST_RESERVE_BYTES)
        if found.left_bytes < size + reserve:
            left, limit = found.left_bytes >> 20, found.limit_bytes >> 20
            raise OSError(errno.ENOMEM, f"{left} of {limit} MiB of memory are left, and training needs some of them")


def _machine(root: Path) -> Iterator[MemoryLeft]:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    if "MemAvailable" in fields and "MemTotal" in fields:
        yield MemoryLeft(int(fields["MemAvailable"]) << 10, int(fields["MemTotal"]) << 10)


def _cgroups(root: Path) -> Iterator[MemoryLeft]:
    for directory, limit_name, usage_name, stale, _ in _levels(root, "self"):
        with contextlib.suppress(ValueError):  # "max", or no such file
            limit, usage = int(_text(directory / limit_name)), int(_text(directory / usage_name))
            yield MemoryLeft(limit - usage + _listed(directory, stale), limit)


class MemoryUse(NamedTuple):
    """The use of a limited cgroup. ``used_bytes``: without page cache, which the kernel drops before it kills."""

    directory: Path
    limit_bytes: int
    used_bytes: int


def memory_uses(root: Path = Path("/"), process: int | str = "self") -> list[MemoryUse]:
    """Return the limited cgroups in which a process is, its own first."""
    found = []
    for directory, limit_name, usage_name, stale, fresh in _levels(root, process):
        with contextlib.suppress(ValueError):
            limit, usage = int(_text(directory / limit_name)), int(_text(directory / usage_name))
            used = usage - _listed(directory, stale) - _listed(directory, fresh)
            if 0 < limit < _UNLIMITED:
                found.append(MemoryUse(directory, limit, max(used, 0)))
    return found


def oom_kills(root: Path = Path("/"), process: int | str = "self") -> tuple[int | None, int | None]:
    """Return how often the kernel has killed for lack of memory: in a process's job, and on this machine.

    The job is Slurm's cgroup ``job_N``, or else the process's own. None where it is not known.
    """
    directories = [directory for directory, *_ in _levels(root, process)]
    job = next((one for one in directories if one.name.startswith("job_")), directories[0] if directories else None)
    counts = [] if job is None else [_count(job / name, "oom_kill") for name in ("memory.events", "memory.oom_control")]
    machine = _count(root / "proc/vmstat", "oom_kill")
    return next((count for count in counts if count is not None), None), machine


def _levels(root: Path, process: int | str) -> Iterator[tuple[Path, str, str, str, str]]:
    """Yield the cgroups on the way up, with the names of their files.

    A path that a container does not see is skipped; its root is the container's.
    """
    for line in _text(root / f"proc/{process}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        directory = mounted / path.strip("/")
        while directory.is_relative_to(mounted):
            yield (directory, *(_V1 if controllers else _V2))
            directory = directory.parent


def _listed(directory: Path, name: str) -> int:
    return _count(directory / "memory.stat", name) or 0


def _count(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d{{1,18}})$", _text(path), re.MULTILINE)
    return int(found[1]) if found else None


# the kernel drops page cache that was not used lately before it kills a process; files in /dev/shm are never among it
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_UNLIMITED = 1 << 62  # cgroup v1 has a number where v2 has "max"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
