"""The message from agents to the controller about how ranks spend their time."""

from __future__ import annotations

from resilio_hpc.diagnose.slow.rank_facts import NodeFacts, RankWindow
from resilio_hpc.launch.protocol.message_parts import Count, Node, Struct


class RankTimes(Struct, frozen=True):
    """How a node's ranks, in their order, spent a window of time; ``window``: its number since 1970."""

    node: Node
    epoch: Count
    round: Count
    window: Count
    ranks: tuple[RankWindow, ...]
    facts: NodeFacts
