"""Memory for snapshots: /dev/shm, its huge pages, and the cgroup that counts what is in it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from pathlib import Path

from resilio_hpc.core import file_system
from resilio_hpc.core.errors import ResilioError, os_error_text
from resilio_hpc.core.memory_left import memory_left
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, notice, ok, warning
from resilio_hpc.launch.rundir import node_directories

_SHM = node_directories.SHARED_MEMORY
_LEAST_FREE_BYTES = 64 << 20
_LEAST_SHARE = 8  # of the memory: a snapshot and the one before it are about as large as model and optimizer
_LITTLE_MEMORY_BYTES = 512 << 20
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_TRIED_BYTES = 4 << 20


def shared_memory(view: DoctorView) -> DoctorFinding:
    """Make a private directory and a nameless file in /dev/shm, as agents and ranks do; compare its size."""
    view.mark(str(_SHM))
    room = os.statvfs(_SHM)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    try:
        in_memory = _try_files()
    except (OSError, ResilioError) as error:
        why = os_error_text(error, str(_SHM)) if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            return failed(
                f"{_SHM} is full: {_amount(free)} of {_amount(size)} are free",
                "Agents keep the ranks' snapshots there, and torch its queues between processes.",
                "remove what other programs left there (ls -l /dev/shm), or make it larger: "
                "mount -o remount,size=50% /dev/shm",
            )
        return failed(
            f"{_SHM} cannot be used: {why}",
            "Agents keep the ranks' snapshots there: they do not start.",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; in a container: let it have a /dev/shm that is writable",
        )
    seen = f"{_amount(free)} of {_amount(size)} free"
    if not in_memory:
        return warning(
            f"{_SHM} is not in memory; {seen}",
            "Snapshots are written at a disk's speed.",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size < total // _LEAST_SHARE or free < _LEAST_FREE_BYTES:
        return warning(
            f"small: {seen}, and this machine has {_amount(total)} of memory",
            "Snapshots that do not fit go to a disk. It takes two of each rank: model and optimizer.",
            "mount -o remount,size=50% /dev/shm; in a container: --shm-size",
        )
    return ok(f"{seen}, in memory")


def _try_files() -> bool:
    """Return whether the files are in memory. Raises OSError, ResilioError."""
    os.rmdir(node_directories.make(_SHM))  # noqa: PTH106 - a name of our own
    fd = os.open(_SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, os.sysconf("SC_PAGE_SIZE"))
        with mmap.mmap(fd, os.sysconf("SC_PAGE_SIZE")) as memory:
            memory[0] = 1
        return file_system.is_in_memory(fd)
    finally:
        os.close(fd)


def huge_pages(view: DoctorView) -> DoctorFinding:
    """Allocate a little shared memory in huge pages, as snapshots are."""
    from resilio_hpc.ckpt.snapshot import huge_memory
    from resilio_hpc.native import map_shared

    view.mark(str(_SHM))
    fd = os.open(_SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _TRIED_BYTES)
        huge = huge_memory.allocate(fd, map_shared(fd, _TRIED_BYTES, True), 0, _TRIED_BYTES)
    finally:
        os.close(fd)
    settings = f"shmem_enabled is {_chosen('shmem_enabled')}, enabled is {_chosen('enabled')}"
    if huge:
        return ok(f"snapshots get them; {settings}")
    return notice(
        f"snapshots get none; {settings}",
        "The first snapshots of a rank take longer, since each small page is made separately.",
        "Linux 6.1 or newer, or as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _chosen(name: str) -> str:
    try:
        found = re.search(r"\[(\w+)\]", (_HUGE / name).read_text())
    except OSError:
        return "not there"
    return found[1] if found else "unknown"


def cgroup(view: DoctorView) -> DoctorFinding:
    """Read this process's cgroup: its version, and the memory that it leaves."""
    view.mark("/sys/fs/cgroup")
    version = _cgroup_version()
    found = memory_left()
    if found is None:
        return warning(
            f"{version}; the free memory cannot be read",
            "A snapshot that does not fit ends in an out-of-memory kill, not in an error.",
            "make /proc/meminfo and /sys/fs/cgroup readable here",
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limited = found.limit_bytes < 0.95 * total
    seen = f"{version}, {_amount(found.left_bytes)} of {_amount(found.limit_bytes)} of memory left"
    if found.left_bytes < _LITTLE_MEMORY_BYTES:
        return warning(
            seen,
            "Ranks, and their snapshots in /dev/shm, count against it: the kernel kills one of them.",
            "ask Slurm for more: --mem=0 takes all of a node's" if limited else "end what else runs here",
        )
    room = os.statvfs(_SHM)
    if limited and room.f_blocks * room.f_frsize > found.limit_bytes:
        return notice(
            f"{seen}, and /dev/shm claims {_amount(room.f_blocks * room.f_frsize)}",
            "What is in /dev/shm counts against the limit of the cgroup.",
            "ask Slurm for enough memory for two snapshots of each rank: --mem",
        )
    return ok(seen)


def _cgroup_version() -> str:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    old = any("memory" in line.split(":")[1].split(",") for line in lines if line.count(":") >= 2)
    if old:
        return "cgroup v1"
    return "cgroup v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "no cgroups"


def _amount(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count >> 10} KiB"
