"""The shapes that a cluster has room for: now, soon, or ever. Pure. RES-18, RES-22."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from resilio_hpc.autoparallel.base.hardware import machine
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.search.choice import PART, Offer
from resilio_hpc.autoparallel.search.inventory import Inventory, Pool
from resilio_hpc.autoparallel.search.layout_space import divisors
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

SOON_S = 3600.0


@dataclass(frozen=True)
class OfferRequest:
    """A request: ``least`` to ``most`` GPUs, 0 for any number of whole nodes.

    No ``partitions``: all; ``gpu`` "": every type.

    ``run_s``: the time limit that the job will ask for, 0 where it is not known.
    """

    least: int = 0
    most: int = 0
    partitions: tuple[str, ...] = ()
    gpu: str = ""
    run_s: float = 0.0


def offers(inventory: Inventory, request: OfferRequest, now: float, soon_s: float = SOON_S) -> list[Offer]:
    """Return every requested shape that a pool is large enough for, most GPUs per node first. ``now``: Unix seconds."""
    found = [one for pool in fitting(inventory, request) for one in _of_pool(pool, inventory, request, now, soon_s)]
    return sorted(found, key=lambda one: (-one.shape.ranks_per_node, -one.shape.ranks, one.partition, one.gpu))


def fitting(inventory: Inventory, request: OfferRequest) -> list[Pool]:
    """Return pools with GPUs of the requested kind."""
    return [
        pool for pool in inventory.pools
        if pool.gpus_per_node > 0
        and (not request.partitions or pool.partition in request.partitions)
        and (not request.gpu or same_kind(pool.gpu_type, request.gpu))
        and (not request.run_s or pool.max_time_s is None or request.run_s <= pool.max_time_s)
    ]  # fmt: skip


def same_kind(gpu: str, other: str) -> bool:
    """Return whether two names mean one GPU."""
    if gpu.casefold() == other.casefold():
        return True
    try:
        return machine(gpu).gpu == machine(other).gpu
    except UsageError:
        return False


def _of_pool(pool: Pool, inventory: Inventory, request: OfferRequest, now: float, soon_s: float) -> Iterator[Offer]:
    most_nodes = min(len(pool.nodes), pool.max_nodes or len(pool.nodes))
    for shape in _shapes(pool, request):
        if shape.nodes <= most_nodes:
            yield _offer(pool, shape, inventory, now, soon_s)


def _shapes(pool: Pool, request: OfferRequest) -> Iterator[Shape]:
    """All (nodes, GPUs of each) of one number of GPUs; of a range, whole nodes: a run grows and shrinks by these."""
    each = pool.gpus_per_node
    if request.least == request.most > 0:
        whole = request.most
        yield from (Shape(whole // m, m) for m in reversed(divisors(whole)) if m <= each)
        return
    most = request.most // each if request.most else len(pool.nodes)
    yield from (Shape(nodes, each) for nodes in range(max(1, -(-request.least // each)), most + 1))


def _offer(pool: Pool, shape: Shape, inventory: Inventory, now: float, soon_s: float) -> Offer:
    part = shape.ranks_per_node < pool.gpus_per_node
    unused = pool.unused or (pool.gpus_per_node,) * len(pool.idle)
    free = sum(count >= shape.ranks_per_node for count in unused) if part else len(pool.idle)
    marks = [PART] * part + ["over-subscribed"] * pool.shared + ["preemptible"] * pool.preemptible
    wait = 0.0 if shape.nodes <= free else _wait(pool, shape.nodes - free, inventory, now)
    start = "now" if wait == 0 else "soon" if wait is not None and wait <= soon_s else "ever"
    return Offer(shape, pool.partition, pool.gpu_type, start, wait, tuple(marks))  # type: ignore[arg-type]


def _wait(pool: Pool, missing: int, inventory: Inventory, now: float) -> float | None:
    """Return the seconds until so many more nodes are free, after the jobs that wait already; None: unknown.

    Jobs end at their time limits at the latest, so this is an upper bound, unless others come in between.
    """
    ahead = sum(one.nodes for one in inventory.waiting if pool.partition in one.partitions)
    needed = missing + max(0, ahead - len(pool.planned))
    if needed > len(pool.frees_at):
        return None
    return max(1.0, pool.frees_at[needed - 1] - now)


def why_none(inventory: Inventory, request: OfferRequest) -> str:
    """Return why no shape is offered, and what would be."""
    if not inventory.pools:
        return "no partition that is up has nodes in service"
    with_gpus = [pool for pool in inventory.pools if pool.gpus_per_node > 0]
    if not with_gpus:
        return "no node has GPUs (as Gres): --inventory FILE describes what there is"
    named = [pool for pool in with_gpus if not request.partitions or pool.partition in request.partitions]
    if not named:
        known = ", ".join(sorted({pool.partition for pool in with_gpus}))
        return f"no partition {', '.join(request.partitions)} has GPUs; those that do: {printable(known, 200)}"
    pools = fitting(inventory, request)
    if not pools and request.gpu and not any(same_kind(pool.gpu_type, request.gpu) for pool in named):
        kinds = ", ".join(sorted({pool.gpu_type or "(no type)" for pool in named}))
        return f"no {request.gpu} there; the types are {printable(kinds, 200)}"
    if not pools:
        longest = max(pool.max_time_s or 0 for pool in named)
        return f"a run of {request.run_s / 3600:.1f} h is longer than the partitions' limit of {longest / 3600:.1f} h"
    largest = max(pools, key=lambda pool: most_gpus(pool))
    return (
        f"{request.least} GPUs were asked for; partition {largest.partition} gives a job at most {most_gpus(largest)} "
        f"({most_gpus(largest) // largest.gpus_per_node} nodes x {largest.gpus_per_node})"
    )


def most_gpus(pool: Pool) -> int:
    """Return the most GPUs that one job can have."""
    return min(len(pool.nodes), pool.max_nodes or len(pool.nodes)) * pool.gpus_per_node
