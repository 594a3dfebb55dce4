"""The facts and the decision of a resize, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from resilio_hpc.autoparallel import Inventory
from resilio_hpc.autoparallel.measure.throughput import RunSpeed

Phase = Literal["training", "settling", "between_jobs", "over"]
JoinerState = Literal["pending", "running", "leaving", "ending"]
Action = Literal["stay", "grow", "shrink", "end", "withdraw", "reshape"]


@dataclass(frozen=True)
class JoinerJob:
    """A job of this run's user that adds nodes to the run. ``since_s``: how long it has been in ``state``.

    "leaving": it was asked to go after the next commit; "ending": at once. ``reason``: Slurm's, why it is pending.
    """

    job: str
    nodes: int
    names: tuple[str, ...]
    state: JoinerState
    since_s: float
    reason: str = ""


@dataclass(frozen=True)
class Successor:
    """The pending next job of the chain. ``waits_for_nodes``: only missing nodes keep it from starting."""

    job: str
    nodes: int
    waits_for_nodes: bool


@dataclass(frozen=True)
class ResizeFacts:
    """The run, its jobs and the cluster at one moment.

    ``nodes``: that train; ``least``, ``most``, ``unit``: the limits that hold; ``own_nodes``: of the run's own job at
    its start; ``held``: all nodes that take part, spares too; ``ends_in_s``: until the time limit of the run's own job,
    None without one. ``idle_for_s``: how long each node has been seen idle, None where it was not watched before.
    ``own_jobs``: the jobs of the run, no other run's. ``user_nodes``: of all jobs of this user, those that
    wait too; ``quota_nodes``: how many more Slurm's limits allow, None without limits.
    ``refused``: what Slurm would not do a moment ago, by action and code of the decision, and its words.
    ``avoided``: nodes that failed lately, as the user's memory and this run know.
    ``throughput``: None where no step time is known. ``last_resize_s``: how long ago, None for never.
    ``lost_joiners``: those that ended without having joined, in a row.
    """

    phase: Phase
    nodes: int
    least: int
    most: int
    unit: int
    own_nodes: int
    held: frozenset[str]
    ranks_per_node: int
    partition: str
    inventory: Inventory
    spares: int = 0
    gpu_type: str | None = None
    gpus_per_node: int | None = None
    ends_in_s: float | None = None
    idle_for_s: Mapping[str, float] | None = None
    joiners: tuple[JoinerJob, ...] = ()
    own_jobs: frozenset[str] = frozenset()
    user_nodes: int = 0
    quota_nodes: int | None = None
    gpu_utilisation: float | None = None
    throughput: RunSpeed | None = None
    restart_s: float | None = None
    last_resize_s: float | None = None
    lost_joiners: int = 0
    successor: Successor | None = None
    model_parallel: int = 1
    global_batch: int = 0
    micro_batch: int = 1
    avoided: frozenset[str] = frozenset()
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class ResizeDecision:
    """What to do now; one thing at a time.

    ``code``: a stable word for the reason; ``reason``: a line with the numbers. ``nodes``: the run's nodes afterwards.
    ``jobs``: joiners to be ended or withdrawn, or the successor to be reshaped; ``sizes``: nodes of each joiner job to
    be submitted, or of the successor.
    """

    action: Action
    code: str
    reason: str
    nodes: int = 0
    jobs: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    expected: Mapping[str, float] = field(default_factory=dict)
