"""Which node keeps copies of which node's snapshots, and what a round can restore from memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

from resilio_hpc.launch.controller.run_state import RunState
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner


def partner_of(member: m.Member, run: RunState) -> Partner | None:
    """Return the member whose snapshots ``member`` copies: half the run away, so mostly in another rack.

    None where that one serves no copies.
    """
    members = run.members
    partner = members[(member.node_rank - max(1, len(members) // 2)) % len(members)]
    agent = run.agents.get(partner.node)
    if partner.node == member.node or agent is None or not agent.copy_port:
        return None
    return Partner(partner.first_rank, partner.local_world_size, f"{partner.address}:{agent.copy_port}")


def copier_of(node: str, run: RunState) -> m.Member | None:
    """Return the member whose partner this node is; None where it is no member, or the only one."""
    members = run.members
    rank = next((member.node_rank for member in members if member.node == node), None)
    if rank is None or len(members) < 2:
        return None
    return members[(rank + max(1, len(members) // 2)) % len(members)]


class InMemory(Struct):
    """Snapshots that the members of a round hold.

    By step: ``own``, the ranks that have it on their own node; ``elsewhere``, for other ranks the endpoint of a
    replicator that has it. ``shared``: steps of worlds of other sizes that every rank can restore on its own node.
    """

    world_size: int
    own: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    elsewhere: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    shared: set[int] = field(default_factory=set)

    @property
    def whole(self) -> set[int]:
        """Return the steps that every rank can restore from memory."""
        steps = self.own.keys() | self.elsewhere.keys()
        return {step for step in steps if len(self.own[step] | self.elsewhere[step].keys()) == self.world_size}

    def has_most(self, step: int) -> bool:
        """Return whether more than half of the ranks have ``step`` on their own node."""
        return 2 * len(self.own[step]) > self.world_size

    def fetches(self, step: int) -> tuple[m.MissingSnapshot, ...]:
        """Return, for each rank without ``step`` on its own node, where it is."""
        missing = [rank for rank in range(self.world_size) if rank not in self.own[step]]
        return tuple(m.MissingSnapshot(rank, self.elsewhere[step].get(rank, "")) for rank in missing)


def in_memory(run: RunState) -> InMemory:
    """Return the snapshots of the members, all of the same life.

    A node that missed the last start may hold steps that were computed anew without it: its copies do not count.
    """
    found = InMemory(run.world_size)
    shared: list[set[int]] = []
    for member in run.members:
        agent = run.agents[member.node]
        if agent.known == m.NO_LIFE or agent.known != run.last_life:
            shared.append(set())
            continue
        shared.append(_shared(agent.held, member.local_world_size, run.world_size))
        ranks = range(member.first_rank, member.first_rank + member.local_world_size)
        for held in agent.held:
            if held.world_size != run.world_size or held.rank >= run.world_size:
                continue
            if held.rank in ranks and not held.is_copy:
                found.own[held.step].add(held.rank)
            elif agent.copy_port:
                found.elsewhere[held.step][held.rank] = f"{member.address}:{agent.copy_port}"
    found.shared = set.intersection(*shared) if shared else set()
    return found


def _shared(held: Sequence[m.Held], ranks: int, world_size: int) -> set[int]:
    """Return the steps of worlds of other sizes of which a node has what so many ranks need."""
    numbers: dict[tuple[int, int], int] = defaultdict(int)
    for one in held:
        if one.is_shared and not one.is_copy and one.world_size != world_size:
            numbers[one.step, one.world_size] += 1
    return {step for (step, _), number in numbers.items() if number >= ranks}
