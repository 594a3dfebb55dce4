"""The shapes that a run may have: so many nodes, with so many ranks on each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """``nodes`` of one pool with ``ranks_per_node`` ranks each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Constraints:
    """What a shape must satisfy.

    ``held``: nodes that the run has already, which it need not find idle. ``model_parallel``: ranks that hold one copy
    of the model (tensor times pipeline parallelism). ``global_batch`` and ``micro_batch``: samples, 0 where not known;
    a shape then fits whatever its number of ranks. ``gpu_type`` and ``gpus_per_node``: of the pool, None for any.
    """

    partition: str
    ranks_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    held: frozenset[str] = frozenset()
    model_parallel: int = 1
    global_batch: int = 0
    micro_batch: int = 1
    gpu_type: str | None = None
    gpus_per_node: int | None = None


def shapes(constraints: Constraints) -> Iterator[Shape]:
    """Every shape between the least and the most nodes whose ranks fit model and batch; fewest nodes first."""
    unit = constraints.node_unit
    least = -(-max(constraints.min_nodes, 1) // unit) * unit
    for nodes in range(least, constraints.max_nodes + 1, unit):
        shape = Shape(nodes, constraints.ranks_per_node)
        if not why_not(shape, constraints):
            yield shape


def why_not(shape: Shape, constraints: Constraints) -> str:
    """Why a shape does not fit model or batch, or ""."""
    if shape.ranks % constraints.model_parallel:
        return f"{shape.ranks} ranks are no multiple of {constraints.model_parallel} (tensor x pipeline parallel)"
    copies = shape.ranks // constraints.model_parallel
    if constraints.global_batch and constraints.global_batch % (copies * constraints.micro_batch):
        return (
            f"a global batch of {constraints.global_batch} cannot be split over {copies} data-parallel ranks in micro "
            f"batches of {constraints.micro_batch}"
        )
    return ""
