"""Which ways a node has for copies of snapshots to other nodes: TCP, and whether there is hardware for RDMA."""

from __future__ import annotations

import ctypes
import resource
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, notice, ok

_CLASS = Path("/sys/class/infiniband")
_LIBRARY = "libibverbs.so.1"
_ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class RdmaSeen:
    """``devices``: how many libibverbs opens for programs, None: it is not installed. ``active``: device and port.

    ``free_huge_pages``, of ``huge_page_bytes`` each; ``locked_bytes``: that a process may lock, None: no limit.
    """

    devices: int | None
    active: tuple[str, ...]
    free_huge_pages: int
    huge_page_bytes: int
    locked_bytes: int | None


def transports(view: DoctorView) -> DoctorFinding:
    """Look for RDMA: the library, its devices, active ports, huge pages, and how much memory may be locked."""
    view.mark(_LIBRARY)
    return judged(look(_CLASS, Path("/proc/meminfo")))


def look(sys_class: Path, meminfo: Path) -> RdmaSeen:
    """Return what there is. Raises OSError where the kernel's table of memory cannot be read."""
    words = {name: int(rest.split()[0]) for name, _, rest in _lines(meminfo)}
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return RdmaSeen(
        _devices(), _active(sys_class), words.get("HugePages_Free", 0), words.get("Hugepagesize", 0) << 10,
        None if soft == resource.RLIM_INFINITY else soft,
    )  # fmt: skip


def judged(seen: RdmaSeen) -> DoctorFinding:
    """Return what that means. Copies go over TCP whatever is there, since no RDMA transport could be tried."""
    tcp = "copies of snapshots go over TCP, encrypted"
    if not seen.active:
        library = "libibverbs is not installed" if seen.devices is None else f"libibverbs sees {seen.devices} devices"
        return ok(f"{tcp}; no active RDMA port ({library})")
    locked = "no limit" if seen.locked_bytes is None else f"{seen.locked_bytes >> 20} MiB"
    return notice(
        f"{tcp}; RDMA is there and not used: {', '.join(seen.active[:4])}; libibverbs "
        + ("is not installed" if seen.devices is None else f"sees {seen.devices} device(s)")
        + f"; {seen.free_huge_pages} huge pages of {seen.huge_page_bytes >> 20} MiB free; locked memory: {locked}",
        "A lost node's state comes at the speed of TCP. Training's own collectives are not concerned.",
        "nothing: there is no RDMA transport yet, since it could not be tried (docs/architecture.md)",
    )


def _lines(path: Path) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in path.read_text().splitlines() if ":" in line]


def _active(sys_class: Path) -> tuple[str, ...]:
    found = []
    for state in sorted(sys_class.glob("*/ports/*/state")):
        try:
            is_active = state.read_text().strip().endswith(_ACTIVE)
        except OSError:
            continue  # a port that is gone
        if is_active:
            found.append(f"{state.parts[-4]} port {state.parts[-2]}")
    return tuple(found)


def _devices() -> int | None:
    """Return how many devices the verbs library finds; None without the library."""
    try:
        verbs = ctypes.CDLL(_LIBRARY)
        verbs.ibv_get_device_list.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    count = ctypes.c_int(0)
    listed = verbs.ibv_get_device_list(ctypes.byref(count))
    if listed:
        verbs.ibv_free_device_list(ctypes.c_void_p(listed))
    return count.value
