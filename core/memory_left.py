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
    """Yield each limit on the way up. A path that a container does not see is skipped; its root is the container's."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        directory = mounted / path.strip("/")
        while directory.is_relative_to(mounted):
            with contextlib.suppress(ValueError):  # "max", or no such file
                yield _cgroup(directory, *names)
            directory = directory.parent


def _cgroup(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> MemoryLeft:
    """Return what a cgroup has left. Raises ValueError where it has no limit."""
    limit, usage = int(_text(directory / limit_name)), int(_text(directory / usage_name))
    cache = re.search(rf"^{cache_name} (\d+)$", _text(directory / "memory.stat"), re.MULTILINE)
    return MemoryLeft(limit - usage + (int(cache[1]) if cache else 0), limit)


# the kernel drops page cache that was not used lately before it kills a process; files in /dev/shm are never among it
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
