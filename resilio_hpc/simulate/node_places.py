"""The nodes of a simulated job: members by place, spares, broken ones. The real rendezvous chooses. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from resilio_hpc.launch.controller.facts.rendezvous import AvailableNode, NodeCounts, choose, whole_first
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind

SWITCH_NODES = 16  # nodes of one switch, which decide on a spare's place alone


def name_of(node: int) -> str:
    """Return the name of a node."""
    return f"n{node}"


class NodePlaces:
    """The nodes of a job. ``members``: by node rank; ``lost``: places whose node is gone; ``broken``: nodes."""

    def __init__(self, shape: NodeCounts, spares: int, slots: int) -> None:
        self._shape, self._spares, self._slots = shape, spares, slots
        self._numbers = count()
        self.members: list[int] = []
        self.spares: list[int] = []
        self.lost: set[int] = set()
        self.broken: set[int] = set()

    def fill(self) -> None:
        """Take sound nodes for a job."""
        self.members = [next(self._numbers) for _ in range(self._shape.maximum)]
        self.spares = [next(self._numbers) for _ in range(self._spares)]
        self.lost, self.broken = set(), set()

    def empty(self) -> None:
        """Give all nodes back."""
        self.members, self.spares, self.lost = [], [], set()

    def has(self, node: int) -> bool:
        """Return whether a node is here, and not lost."""
        return node in self.spares or any(
            node == member and place not in self.lost for place, member in enumerate(self.members)
        )

    def lose(self, place: int) -> int:
        """Return the node that is gone."""
        self.lost.add(place)
        return self.members[place]

    def usable(self, evict: bool) -> list[int]:
        """Return the nodes that could take part."""
        gone = {self.members[place] for place in self.lost} | (self.broken if evict else set())
        if not gone:
            return self.members + self.spares
        return [node for node in (*self.members, *self.spares) if node not in gone]

    def choose(self, suspects: Collection[str], evict: bool) -> list[int]:
        """Choose the members of the next round; return the places that get another node.

        Where the number of nodes stays, the rendezvous leaves survivors at their places: it is asked for the others.
        """
        usable = self.usable(evict)
        size = self._shape.trim(len(usable))
        keeps = size == len(self.members)
        here, before = set(usable), list(self.members)
        open_places = [
            place for place, node in enumerate(before)
            if not keeps or node not in here or name_of(node) in suspects
        ]  # fmt: skip
        asked = [before[place] for place in open_places]
        staying = set() if not keeps else set(before) - set(asked)
        candidates = [self._candidate(node, suspects) for node in usable if node not in staying]
        shape = NodeCounts(len(open_places), len(open_places)) if keeps else self._shape
        chosen = choose(whole_first(candidates, shape), [name_of(node) for node in asked], shape, 0)
        nodes = [int(member.node[1:]) for member in chosen]
        self.members = [*before] if keeps else nodes
        if keeps:
            for place, node in zip(open_places, nodes, strict=True):
                self.members[place] = node
        now = set(self.members)
        self.spares = [node for node in usable if node not in now]
        self.lost = set()
        return [place for place, node in enumerate(self.members) if not keeps or node != before[place]]

    def _candidate(self, node: int, suspects: Collection[str]) -> AvailableNode:
        name = name_of(node)
        return AvailableNode(name, node, name, self._slots, f"s{node // SWITCH_NODES}.{name}", 0, name in suspects)

    def fault_again(self, at_us: int) -> SimulatedFault | None:
        """Return the fault of a broken node that ranks were started on, if there is one."""
        if not self.broken:
            return None
        for place, node in enumerate(self.members):
            if node in self.broken:
                return SimulatedFault(at_us, FaultKind.DEVICE, (place,), True, 0)
        return None
