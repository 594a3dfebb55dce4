"""Whether orders that came beside ours are known to have been for other nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.reason import read_reason


@dataclass(frozen=True)
class Sight:
    """All nodes, and the count on the side that lies outside: before the nodes were read, or after."""

    count: int | None
    nodes: tuple[Node, ...]


def only_drained_others(before: Sight, after: Sight, target: str, own: int) -> bool:
    """Whether each order in between, but ``own`` ones to ``target``, is seen in another node, which one of us drained.

    A drain of ours is an order to one node: so no other was to ``target``.
    """
    if before.count is None or after.count is None:
        return False
    reasons = {node.name: node.reason for node in before.nodes}
    drained = [node for node in after.nodes if node.name != target and _ours_since(node, reasons)]
    return after.count - before.count - own == len(drained)


def _ours_since(node: Node, reasons: dict[str, str]) -> bool:
    return node.state.drain and node.reason != reasons.get(node.name, "") and read_reason(node.reason) is not None
