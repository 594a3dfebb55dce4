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
        """Return the world size."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Constraints:
    """Conditions for a shape.

    ``model_parallel``: ranks that hold one copy of the model (tensor times pipeline parallelism). ``global_batch`` and
    ``micro_batch``: samples, 0 where not known; a shape then fits with any number of ranks.
    """

    ranks_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    model_parallel: int = 1
    global_batch: int = 0
    micro_batch: int = 1


def shapes(constraints: Constraints) -> Iterator[Shape]:
    """Yield every shape between the least and the most nodes whose ranks fit model and batch; fewest nodes first."""
    unit = constraints.node_unit
    least = -(-max(constraints.min_nodes, 1) // unit) * unit
    for nodes in range(least, constraints.max_nodes + 1, unit):
        shape = Shape(nodes, constraints.ranks_per_node)
        copies, rest = divmod(shape.ranks, constraints.model_parallel)
        if not rest and constraints.global_batch % (copies * constraints.micro_batch) == 0:
            yield shape
