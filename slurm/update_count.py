"""How many orders to nodes slurmctld has carried out, from ``sdiag``: whether another came between, and whether such
others are known to have been for other nodes. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilio_hpc.slurm.drain_reason import read_reason
from resilio_hpc.slurm.model import Node

_SECTION = "Remote Procedure Call statistics by message type"
_UPDATES = re.compile(r"^\s*REQUEST_UPDATE_NODE\s.*?count:(\d{1,18})\s", re.MULTILINE)


def parse_update_count(output: str) -> int | None:
    """The count since slurmctld started or was reconfigured; 0 when there was none; None when this is not sdiag's."""
    if _SECTION not in output:
        return None
    found = _UPDATES.search(output)
    return int(found[1]) if found else 0


def came_alone(before: int | None, after: int | None) -> bool:
    """Whether no other order came between two counts with one of ours between them.

    A count that began anew says nothing, so: not alone. Counts that cannot be had (None) cannot tell either way; then
    this is True, as if they had not been asked for.
    """
    return before is None or after is None or after - before == 1


@dataclass(frozen=True)
class Sight:
    """All nodes, and the count on the side that lies outside: before the nodes were read, or after."""

    count: int | None
    nodes: tuple[Node, ...]


def only_drained_others(before: Sight, after: Sight, target: str, own: int) -> bool:
    """Whether each order in between, but ``own`` ones to ``target``, is seen in another node, which one of us drained.

    A drain of ours is an order to one node: so then nobody else's was to ``target``.
    """
    if before.count is None or after.count is None:
        return False
    reasons = {node.name: node.reason for node in before.nodes}
    drained = [node for node in after.nodes if node.name != target and _ours_since(node, reasons)]
    return after.count - before.count - own == len(drained)


def _ours_since(node: Node, reasons: dict[str, str]) -> bool:
    return node.state.drain and node.reason != reasons.get(node.name, "") and read_reason(node.reason) is not None
