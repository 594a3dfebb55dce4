"""When so many nodes have just been drained by us that it is no longer believable. Pure.

What was drained is read from Slurm itself (our reasons and when they were set), so all who drain, on whichever node,
see the same; drains that we disowned count, too. Nodes that Slurm drained since their prolog failed count as well: ours
may have been among those. Two who drain at the same time may both find room for one more: so each looks again after its
write, and the later one takes its own back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.slurm.drain import PROLOG_ERROR
from resilio_hpc.slurm.drain_policy import DrainPolicy
from resilio_hpc.slurm.drain_reason import PREFIX, is_disowned, read_reason
from resilio_hpc.slurm.model import Node


@dataclass(frozen=True)
class Storm:
    """``drained``: nodes of the partition that we or failed prologs drained within the window; ``allowed`` at most."""

    partition: str
    drained: int
    allowed: int
    total: int
    window_s: float

    def __str__(self) -> str:
        return (
            f"{self.drained} of {self.total} nodes of partition {self.partition or '(none)'} drained by us or by "
            f"prologs within {self.window_s:g} s, {self.allowed} are allowed: look for a cause that they share"
        )


def no_room(nodes: Sequence[Node], target: str, now: float, policy: DrainPolicy) -> Storm | None:
    """The storm that draining ``target``, too, would be part of. ``nodes``: all there are; ``now``: Unix seconds."""
    for name, members in _partitions(nodes, target):
        recent = [node for node in members if node.name != target and _is_recent(node, now, policy)]
        if len(recent) + 1 > _allowed(len(members), policy):
            return _storm(name, len(recent), len(members), policy)
    return None


def one_too_many(nodes: Sequence[Node], target: str, now: float, policy: DrainPolicy) -> Storm | None:
    """The storm in which our drain of ``target`` came too late to be one of the allowed ones."""
    for name, members in _partitions(nodes, target):
        recent = [node for node in members if _is_recent(node, now, policy)]
        order = [node.name for node in sorted(recent, key=lambda node: (node.reason_time or math.inf, node.name))]
        if target in order and order.index(target) >= _allowed(len(members), policy):
            return _storm(name, len(recent), len(members), policy)
    return None


def _partitions(nodes: Sequence[Node], target: str) -> list[tuple[str, list[Node]]]:
    """The partitions of a node with their nodes; a node that is in none counts among those that are in none."""
    own = next((node.partitions for node in nodes if node.name == target), ())
    return [(name, [node for node in nodes if name in (node.partitions or ("",))]) for name in own or ("",)]


def _is_recent(node: Node, now: float, policy: DrainPolicy) -> bool:
    ours = node.reason.startswith(PREFIX) and (read_reason(node.reason) is not None or is_disowned(node.reason))
    if not node.state.drain or not (ours or node.reason.startswith(PROLOG_ERROR)):
        return False
    return node.reason_time is None or now - node.reason_time <= policy.window_s


def _allowed(total: int, policy: DrainPolicy) -> int:
    return max(policy.at_least, math.floor(policy.share * total))


def _storm(name: str, drained: int, total: int, policy: DrainPolicy) -> Storm:
    return Storm(name, drained, _allowed(total, policy), total, policy.window_s)
