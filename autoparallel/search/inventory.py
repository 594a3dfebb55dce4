"""The free nodes of a cluster, by partition and kind of GPU, and the jobs that wait.

Pure: from a SlurmClient's answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.model import Job, Node, Partition

# reasons of pending jobs that wait for nodes, and not for a time, another job, their user or a limit (squeue manual,
# JOB REASON CODES). "None": the scheduler has not looked at the job yet.
WAITS_FOR_NODES = frozenset({"Resources", "Priority", "None", ""})
# an IDLE node with one of these is not available now (sinfo manual, NODE STATE CODES); a powered-down one is, since
# Slurm starts it for a job
_NOT_NOW = frozenset(
    {
        "BLOCKED", "COMPLETING", "DRAIN", "FAIL", "INVALID_REG", "MAINTENANCE", "NOT_RESPONDING", "PERFCTRS",
        "POWERING_DOWN", "POWER_DOWN", "REBOOT_CANCEL", "REBOOT_ISSUED", "REBOOT_REQUESTED", "RESERVED",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """The nodes of one partition that have the same GPUs. Nodes that are drained, down or unknown are left out.

    ``idle``: no job uses them; ``planned``: neither, but Slurm keeps them for a job that waits. ``unused``: unused
    GPUs by node, those of partly used nodes too, of nodes that Slurm does not plan for.
    ``frees_at``: when nodes in use reach their jobs' time limits, Unix seconds. ``max_nodes``: of one job, None without
    a limit. ``shared``: the partition is over-subscribed; ``preemptible``: its jobs may be stopped for others.
    """

    partition: str
    gpu_type: str
    gpus_per_node: int
    nodes: tuple[str, ...]
    idle: tuple[str, ...]
    planned: tuple[str, ...] = ()
    max_nodes: int | None = None
    max_time_s: float | None = None
    unused: tuple[int, ...] = ()
    frees_at: tuple[float, ...] = ()
    shared: bool = False
    preemptible: bool = False


@dataclass(frozen=True)
class Waiting:
    """A job, or a record of a job array, that waits for nodes in one of ``partitions``."""

    job: str
    user: str
    partitions: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class Inventory:
    """The cluster at one moment. ``waiting``: in the order of the queue's answer."""

    pools: tuple[Pool, ...]
    waiting: tuple[Waiting, ...] = ()

    def pool_of(self, node: str, partition: str) -> Pool | None:
        """Return the pool that a node belongs to."""
        return next((pool for pool in self.pools if pool.partition == partition and node in pool.nodes), None)


def take_inventory(nodes: Sequence[Node], partitions: Sequence[Partition], jobs: Iterable[Job]) -> Inventory:
    """Return the inventory of ``client.nodes()``, ``client.partitions()`` and ``client.jobs()``.

    Partitions that are not UP have no pool. A node of several partitions is in a pool of each.
    """
    members: dict[tuple[str, str, int], list[Node]] = {}
    up = {partition.name: partition for partition in partitions if partition.state.upper() == "UP"}
    for node in nodes:
        if node.state.in_service:
            for partition in node.partitions:
                if partition in up:
                    members.setdefault((partition, *gpus_of(node)), []).append(node)
    queue = list(jobs)
    ends = _ends(queue)
    pools = [_pool(key, found, up[key[0]], ends) for key, found in sorted(members.items())]
    return Inventory(tuple(pools), tuple(one for job in queue if (one := _waiting(job)) is not None))


def _ends(jobs: Iterable[Job]) -> dict[str, float]:
    """Return when the last job on each node reaches its time limit; infinite where unknown."""
    ends: dict[str, float] = {}
    for job in jobs:
        if job.state.base in ("RUNNING", "SUSPENDED"):
            for node in job.nodes:
                ends[node] = max(ends.get(node, 0.0), float(job.end_time or math.inf))
    return ends


def gpus_of(node: Node) -> tuple[str, int]:
    """(type, count) of a node's GPUs; several types are joined by ``+``, no type is ""."""
    gpus = _gpus(node.gres)
    return "+".join(sorted({gres.type for gres in gpus} - {""})), sum(gres.count or 0 for gres in gpus)


def is_idle(node: Node) -> bool:
    """Return whether a job could have the whole node now, except for jobs that Slurm plans to start on it."""
    return node.state.base == "IDLE" and not node.state.flags & _NOT_NOW


def _gpus(kinds: Iterable[Gres]) -> list[Gres]:
    return [gres for gres in kinds if gres.name == "gpu"]


def _pool(key: tuple[str, str, int], nodes: Sequence[Node], partition: Partition, ends: Mapping[str, float]) -> Pool:
    free = [node for node in nodes if is_idle(node)]
    usable = [
        node for node in nodes if is_idle(node) or (node.state.base == "MIXED" and not node.state.flags & _NOT_NOW)
    ]
    unused = {node.name: gpus_of(node)[1] - sum(gres.count or 0 for gres in _gpus(node.gres_used)) for node in usable}
    planned = {node.name for node in nodes if "PLANNED" in node.state.flags}
    busy = {node.name for node in nodes} - {node.name for node in free}
    limit = partition.max_nodes
    return Pool(
        partition=key[0],
        gpu_type=key[1],
        gpus_per_node=key[2],
        nodes=tuple(sorted(node.name for node in nodes)),
        idle=tuple(sorted(node.name for node in free if node.name not in planned)),
        planned=tuple(sorted(node.name for node in free if node.name in planned)),
        max_nodes=int(limit) if limit is not None and limit < 1 << 31 else None,
        max_time_s=partition.max_time_s,
        unused=tuple(sorted((max(0, n) for name, n in unused.items() if name not in planned), reverse=True)),
        frees_at=tuple(sorted(ends[name] for name in busy if ends.get(name, math.inf) < math.inf)),
        shared=partition.over_subscribe.startswith(("YES", "FORCE")),
        preemptible=partition.preempt_mode not in ("", "OFF"),
    )


def _waiting(job: Job) -> Waiting | None:
    if job.state.base != "PENDING" or job.reason not in WAITS_FOR_NODES:
        return None
    partitions = tuple(name for name in job.partition.split(",") if name)
    return Waiting(job.address, job.user, partitions, max(1, job.node_count or 1))
