"""Which nodes take part in a round, and as which node rank (DLR-2). Pure.

There are no waiting windows: a round is possible as soon as the nodes that it needs are in. Node ranks are stable: a
survivor keeps its rank, a replacement takes the rank of the node it replaces, so rank 0 stays in place. Of the others,
a node whose own disk has the state of some ranks gets these ranks (RES-11).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.launch.protocol.messages import Member


class AvailableNode(Struct, frozen=True):
    """A node that could take part.

    ``order``: its position in the allocation; ``topology``: Slurm's, or empty; ``evicted``: devices that are out of use
    there; ``suspect``: a fault of the node ended a round.

    Slurm's SLURM_TOPOLOGY_ADDR names the switches from the top to the node itself: ``s0.s4.n17``.
    """

    node: str
    order: int
    address: str
    local_world_size: int
    topology: str = ""
    evicted: int = 0
    suspect: bool = False


class NodeCounts(Struct, frozen=True):
    """How many nodes a round takes: ``minimum`` to ``maximum``, a multiple of ``unit``."""

    minimum: int
    maximum: int
    unit: int = 1

    def trim(self, nodes: int) -> int:
        """Return the largest node count allowed with ``nodes`` at hand; 0 when there are too few."""
        count = min(nodes, self.maximum) // self.unit * self.unit
        return count if count >= self.minimum else 0


def whole_first(candidates: Collection[AvailableNode], shape: NodeCounts) -> list[AvailableNode]:
    """Return the candidates without nodes that had a fault, or have evicted devices (RES-10).

    Such a node stays where no waiting node can replace it.
    """
    reduced = sorted((c for c in candidates if c.suspect or c.evicted), key=lambda c: (not c.suspect, -c.evicted))
    waits = {one.node for one in reduced[: len(candidates) - shape.trim(len(candidates))]}
    return [candidate for candidate in candidates if candidate.node not in waits]


def by_switch(candidates: Collection[AvailableNode]) -> list[AvailableNode]:
    """Return the nodes with those of one switch side by side, at every level; otherwise in the allocation's order."""
    first: dict[tuple[str, ...], int] = {}
    for candidate in candidates:
        for switch in _switches(candidate):
            first[switch] = min(candidate.order, first.get(switch, candidate.order))
    return sorted(candidates, key=lambda c: (*(first[switch] for switch in _switches(c)), c.order))


def _switches(candidate: AvailableNode) -> list[tuple[str, ...]]:
    """Return the node's switches, each by its path from the top."""
    names = tuple(candidate.topology.split(".")[:-1])
    return [names[: depth + 1] for depth in range(len(names))]


def places_on_disk(
    candidates: Collection[AvailableNode], disks: Mapping[str, Sequence[OwnCopy]], step: int, nodes: int
) -> dict[str, int]:
    """Return the node rank whose state of ``step`` a candidate's own disk has, by name.

    ``nodes``: how many take part. Empty where candidates have different numbers of ranks: node ranks do not tell the
    ranks then.
    """
    slots = {candidate.local_world_size for candidate in candidates}
    if len(slots) != 1:
        return {}
    ranks = slots.pop()
    found = {}
    for candidate in candidates:
        for copy in disks.get(candidate.node, ()):
            if (copy.step, copy.ranks, copy.world_size) == (
                step,
                ranks,
                ranks * nodes,
            ) and copy.first_rank % ranks == 0:
                found[candidate.node] = copy.first_rank // ranks
    return found


def choose(
    candidates: Collection[AvailableNode],
    previous: Sequence[str],
    shape: NodeCounts,
    coming: int,
    on_disk: Mapping[str, int] = MappingProxyType({}),
) -> list[Member]:
    """Return the members of the next round in node-rank order; empty while it is better to wait.

    ``previous`` holds the former members in node-rank order. ``coming`` counts nodes that may still appear: a round
    waits for them only when it would then be larger. ``on_disk``: see ``places_on_disk``.

    As many ranks as possible find their state on their own node: a node has one file of a step, so each free place goes
    to the first node that has it. A node that stays keeps its place, since its memory has its ranks' snapshots. In a
    world of another size these have no use, and all places are free.
    """
    count = shape.trim(len(candidates))
    if count == 0 or count < shape.trim(len(candidates) + coming):
        return []
    by_name = {candidate.node: candidate for candidate in candidates}
    former = set(previous)
    newcomers = [c.node for c in by_switch(candidates) if c.node not in former]
    stay = [node for node in previous if node in by_name]
    if count == len(previous):
        names = _filled([node if node in by_name else None for node in previous], newcomers, on_disk)
    else:
        names = _filled([None] * count, stay + newcomers, on_disk)
    members: list[Member] = []
    first_rank = 0
    for node_rank, name in enumerate(names):
        chosen = by_name[name]
        members.append(Member(name, node_rank, chosen.address, chosen.local_world_size, first_rank))
        first_rank += chosen.local_world_size
    return members


def _filled(places: list[str | None], nodes: Sequence[str], on_disk: Mapping[str, int]) -> list[str]:
    """Return who takes each place: first nodes whose disk has that place's state, then the others in their order."""
    names = list(places)
    for node in nodes:
        place = on_disk.get(node, -1)
        if 0 <= place < len(names) and names[place] is None:
            names[place] = node
    placed = {node for node in names if node is not None}
    others = iter([node for node in nodes if node not in placed])
    return [next(others) if node is None else node for node in names]
