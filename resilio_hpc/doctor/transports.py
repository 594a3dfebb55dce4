"""Which ways a node has for copies of snapshots to other nodes: TCP, and RDMA by way of libfabric."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, notice, ok

_CLASSES = Path("/sys/class")
_LIBRARY = "libfabric.so.1"
_ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class RdmaSeen:
    """``active``: devices and ports; ``providers``: of libfabric, which could read remote memory.

    ``missing``: why there are none, "": libfabric is here. ``locked_bytes``: that a process may lock, None: no limit.
    """

    active: tuple[str, ...]
    providers: tuple[str, ...]
    missing: str
    locked_bytes: int | None


def transports(view: DoctorView) -> DoctorFinding:
    """Look for RDMA: active ports, what libfabric could use, and how much memory may be locked."""
    view.mark(_LIBRARY)
    return judged(look(_CLASSES))


def look(classes: Path) -> RdmaSeen:
    """Return what is here. ``classes``: the kernel's table of devices."""
    from resilio_hpc.ckpt.replication.fabric import available_providers

    providers: list[str] = []
    missing = ""
    try:
        providers = available_providers()
    except (OSError, ImportError) as error:
        missing = str(error.strerror if isinstance(error, OSError) else error)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]  # a replicator raises its own limit so far
    return RdmaSeen(_active(classes), tuple(providers), missing, None if hard == resource.RLIM_INFINITY else hard)


def judged(seen: RdmaSeen) -> DoctorFinding:
    """Return how copies go with ``--snapshot-transport auto``, and what that means. Pure."""
    from resilio_hpc.ckpt.replication.fabric import provider_for

    library = f"libfabric: {seen.missing or ', '.join(seen.providers) or 'no provider'}"
    ports, tcp = ", ".join(seen.active[:4]), "copies of snapshots go over TCP, encrypted"
    if not seen.active:
        return ok(f"{tcp}; no active RDMA port ({library})")
    provider = provider_for("auto", seen.providers)
    if not provider:
        return notice(
            f"{tcp}; RDMA is there and not used: {ports}; {library}",
            "A lost node's state comes at the speed of TCP. Training's own collectives are not concerned.",
            "install a libfabric with a provider for it (Debian: libfabric1), where the loader finds it; resilio_hpc "
            "must have been built beside its headers (libfabric-dev)",
        )
    locked = "no limit" if seen.locked_bytes is None else f"{seen.locked_bytes >> 20} MiB"
    means = "They are not encrypted then. No provider for RDMA was tried by this project; if one fails, TCP takes over."
    todo = "--snapshot-transport auto, if you wish; see which way copies went: resilio ledger RUN (by)"
    if seen.locked_bytes is not None:
        means = f"Larger snapshots cannot be registered and go over TCP. {means}"
        todo = f"LimitMEMLOCK=infinity of slurmd's service, memlock in limits.conf; {todo}"
    return notice(f"copies of snapshots can be read by RDMA: {provider}; {ports}; locked memory: {locked}", means, todo)


def _active(classes: Path) -> tuple[str, ...]:
    found = []
    for state in sorted(classes.glob("infiniband/*/ports/*/state")):
        try:
            is_active = state.read_text().strip().endswith(_ACTIVE)
        except OSError:
            continue  # a port that is gone
        if is_active:
            found.append(f"{state.parts[-4]} port {state.parts[-2]}")
    return (*found, *sorted(path.name for path in classes.glob("cxi/*")))
