"""Limits on this package's drains: beyond them, drains are not plausible any more. Pure.

Two rules hold for each partition. Within a window only so many nodes are drained, for any reasons: a storm. And at any
time only so many nodes are held for one check. A check that fails on more nodes is broken, or has found a common cause:
it only warns on the others, while other checks go on. Without the second rule, a check that fails everywhere would
drain a tenth of a cluster each hour.

The drained nodes are read from Slurm itself (the package's reasons and their times), so every node sees the same.
Drains that were disowned count too, and so do nodes that Slurm drained since their prolog failed: that may have been
this package's prolog. Two nodes that drain at the same time may both find room for one more. So each looks again after
its write, and some minutes later, and the later one takes its own drain back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.drain import PROLOG_ERROR
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import BY_HAND, PREFIX, held_for, is_disowned, read_reason

MANY_CAUSES = (BY_HAND, "node-faults")
"""Checks of drains that follow from many causes: a person's, and those of a score of faults."""


@dataclass(frozen=True)
class Storm:
    """More drains than are plausible.

    ``drained``: nodes of the partition, within the window by this package or failed prologs, or now for ``check`` where
    one is named; ``allowed``: the limit.
    """

    partition: str
    drained: int
    allowed: int
    total: int
    window_s: float
    check: str = ""

    def __str__(self) -> str:
        who = f"for {self.check}" if self.check else f"by us or by prologs within {self.window_s:g} s"
        return (
            f"{self.drained} of {self.total} nodes of partition {self.partition or '(none)'} are drained {who}, "
            f"{self.allowed} are allowed: look for a cause that they share"
        )


def no_room(nodes: Sequence[Node], target: str, now: float, policy: DrainPolicy, check: str = "") -> Storm | None:
    """Return the storm that a drain of ``target`` would be part of.

    ``nodes``: all nodes; ``now``: Unix seconds; ``check``: for which it is to be drained; PROLOG_ERROR where its prolog
    is to fail.
    """
    for rule, name, members in _rules(nodes, target, now, policy, check):
        others = [node for node in members if node.name != target and rule.counts(node)]
        if len(others) + 1 > rule.allowed(len(members)):
            return rule.storm(name, len(others), len(members))
    return None


def one_too_many(nodes: Sequence[Node], target: str, now: float, policy: DrainPolicy, check: str = "") -> Storm | None:
    """Return the storm in which this package's drain of ``target`` came too late to be one of the allowed ones."""
    for rule, name, members in _rules(nodes, target, now, policy, check):
        counted = [node for node in members if rule.counts(node)]
        order = [node.name for node in sorted(counted, key=lambda node: (node.reason_time or math.inf, node.name))]
        if target in order and order.index(target) >= rule.allowed(len(members)):
            return rule.storm(name, len(counted), len(members))
    return None


@dataclass(frozen=True)
class _Rule:
    """Which drained nodes count, and how many of a partition may be drained."""

    counts: Callable[[Node], bool]
    share: float
    at_least: int
    window_s: float
    check: str = ""

    def allowed(self, total: int) -> int:
        return max(self.at_least, math.floor(self.share * total))

    def storm(self, partition: str, drained: int, total: int) -> Storm:
        return Storm(partition, drained, self.allowed(total), total, self.window_s, self.check)


def _rules(
    nodes: Sequence[Node], target: str, now: float, policy: DrainPolicy, check: str
) -> Iterator[tuple[_Rule, str, list[Node]]]:
    """Yield each rule for each partition of a node, the check's own first: it does not concern other checks."""
    rules = [_Rule(lambda node: _is_recent(node, now, policy), policy.share, policy.at_least, policy.window_s)]
    if check and check not in MANY_CAUSES:
        own = _Rule(lambda node: _is_held(node, check), policy.check_share, policy.check_at_least, 0.0, check)
        rules.insert(0, own)
    return ((rule, name, members) for rule in rules for name, members in _partitions(nodes, target))


def _partitions(nodes: Sequence[Node], target: str) -> list[tuple[str, list[Node]]]:
    """Return the partitions of a node with their nodes; nodes in no partition count as one."""
    own = next((node.partitions for node in nodes if node.name == target), ())
    return [(name, [node for node in nodes if name in (node.partitions or ("",))]) for name in own or ("",)]


def _is_held(node: Node, check: str) -> bool:
    """Return whether it is drained for this check now."""
    if not node.state.drain:
        return False
    if check == PROLOG_ERROR:
        return node.reason.startswith(PROLOG_ERROR)
    return check in held_for(node.reason)


def _is_recent(node: Node, now: float, policy: DrainPolicy) -> bool:
    ours = node.reason.startswith(PREFIX) and (read_reason(node.reason) is not None or is_disowned(node.reason))
    if not node.state.drain or not (ours or node.reason.startswith(PROLOG_ERROR)):
        return False
    return node.reason_time is None or now - node.reason_time <= policy.window_s
