"""Slurm's nodes, partitions and jobs as plain data, for every version and every way to ask."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.states import JobState, NodeState


@dataclass(frozen=True)
class Node:
    """One node. ``reason_time``: Unix seconds; numbers that Slurm did not tell are None.

    ``partitions`` are sorted; ``reason`` is the text alone, ``reason_by`` the account that set it.
    """

    name: str
    state: NodeState
    partitions: tuple[str, ...] = ()
    cpus: int | None = None
    cpus_allocated: int | None = None
    memory_mb: int | None = None
    memory_allocated_mb: int | None = None
    gres: tuple[Gres, ...] = ()
    gres_used: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    active_features: tuple[str, ...] = ()
    weight: int | None = None
    reason: str = ""
    reason_by: str = ""
    reason_time: int | None = None
    comment: str = ""
    extra: str = ""
    address: str = ""
    version: str = ""


@dataclass(frozen=True)
class Partition:
    """One partition. Times in seconds, ``math.inf`` for no limit, None where nothing is set.

    ``over_subscribe``: NO, EXCLUSIVE, YES:4, FORCE:4.
    """

    name: str
    state: str
    nodes: tuple[str, ...] = ()
    total_nodes: int | None = None
    total_cpus: int | None = None
    default: bool = False
    max_time_s: float | None = None
    default_time_s: float | None = None
    max_nodes: float | None = None
    min_nodes: int | None = None
    priority_tier: int | None = None
    preempt_mode: str = ""
    over_subscribe: str = ""


@dataclass(frozen=True)
class Job:
    """One job, or one record of a job array. Times: Unix seconds; ``time_limit_s`` as a partition's.

    ``array_tasks``: ``"5"`` for one task, ``"1-3%1"`` for those that wait together, "" for no array. ``name``,
    ``comment``, ``command`` and ``work_dir`` are any text of the job's user.
    """

    id: int
    state: JobState
    array_job_id: int | None = None
    array_tasks: str = ""
    reason: str = ""
    user: str = ""
    user_id: int | None = None
    account: str = ""
    qos: str = ""
    partition: str = ""
    node_count: int | None = None
    nodes: tuple[str, ...] = ()
    time_limit_s: float | None = None
    submit_time: int | None = None
    start_time: int | None = None
    end_time: int | None = None
    restarts: int | None = None
    dependency: str = ""
    name: str = ""
    comment: str = ""
    command: str = ""
    work_dir: str = ""

    @property
    def address(self) -> str:
        """Return how Slurm addresses this record: ``42``, or ``42_5`` for one task of an array."""
        if self.array_job_id is not None and self.array_tasks.isdecimal():
            return f"{self.array_job_id}_{self.array_tasks}"
        return str(self.id)
