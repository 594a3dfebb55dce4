"""Which node keeps copies of which node's snapshots, and what a round can restore from memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from msgspec import Struct, field

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner


def partner_rank(node_rank: int, nodes: int) -> int:
    """Return the node rank whose snapshots a node copies: half the run away, so mostly in another rack."""
    return (node_rank - max(1, nodes // 2)) % nodes


def copier_rank(node_rank: int, nodes: int) -> int:
    """Return the node rank that copies a node's snapshots."""
    return (node_rank + max(1, nodes // 2)) % nodes


def partner_of(member: m.Member, run: RunState) -> Partner | None:
    """Return the member whose snapshots ``member`` copies; None where that one serves no copies."""
    members = run.members
    partner = members[partner_rank(member.node_rank, len(members))]
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
    return members[copier_rank(rank, len(members))]


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


class RestoreChoice(Struct, frozen=True):
    """From where a round's ranks go on, None: from the beginning, and the snapshots to fetch to its node before.

    ``of_another_world``: the step that is restored from snapshots of a world of another size, -1: none.
    """

    point: m.RestorePoint | None
    fetches: tuple[m.MissingSnapshot, ...] = ()
    of_another_world: int = -1


def restore_choice(
    found: InMemory, committed: int, bad: Collection[int] = (), not_after: int | None = None
) -> RestoreChoice:
    """Return the newest step that every rank can restore.

    From memory, its own or another node's, where all ranks have the step there. Else from the shared directory; if
    most ranks have that step in their own memory, only the others read it. After a change of the number of ranks
    from memory, too, where all ranks have the same tensors and each node a newer step than the directory.
    ``committed``: the newest durable step, -1: none; ``bad``: steps whose copies in memory are not to be restored.
    """

    def newest_of(steps: set[int]) -> int:
        good = (step for step in steps - set(bad) if not_after is None or step <= not_after)
        return max(good, default=-1)

    newest, of_another_world = newest_of(found.whole), newest_of(found.shared)
    if of_another_world > max(newest, committed):
        return RestoreChoice(m.RestorePoint(Tier.MEMORY, of_another_world), (), of_another_world)
    if newest < 0 and committed < 0:
        return RestoreChoice(None)
    if newest >= committed:
        return RestoreChoice(m.RestorePoint(Tier.MEMORY, newest), found.fetches(newest))
    if committed in bad or not found.has_most(committed):
        return RestoreChoice(m.RestorePoint(Tier.COMMITTED, committed))
    return RestoreChoice(m.RestorePoint(Tier.MEMORY, committed), found.fetches(committed))


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
