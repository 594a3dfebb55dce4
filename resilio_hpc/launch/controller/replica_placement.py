"""Who keeps copies of whose snapshots, and what a round can restore from memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from resilio_hpc.launch.controller.run_state import RunState
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner


def partner_of(member: m.Member, run: RunState) -> Partner | None:
    """Return the member whose snapshots this one keeps copies of: half the run away, and so in another rack, as a rule.

    None where that one serves no copies.
    """
    members = run.members
    partner = members[(member.node_rank - max(1, len(members) // 2)) % len(members)]
    agent = run.agents.get(partner.node)
    if partner.node == member.node or agent is None or not agent.copy_port:
        return None
    return Partner(partner.first_rank, partner.local_world_size, f"{partner.address}:{agent.copy_port}")


@dataclass
class InMemory:
    """What the members of a round hold.

    By step: ``own``, the ranks that have it on their own node; ``elsewhere``, for others the endpoint of a replicator
    that has it.
    """

    world_size: int
    own: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    elsewhere: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def whole(self) -> set[int]:
        """Steps that every rank can have from memory."""
        steps = self.own.keys() | self.elsewhere.keys()
        return {step for step in steps if len(self.own[step] | self.elsewhere[step].keys()) == self.world_size}

    def has_most(self, step: int) -> bool:
        """Whether more than half of the ranks have it on their own node."""
        return 2 * len(self.own[step]) > self.world_size

    def fetches(self, step: int) -> tuple[m.MissingSnapshot, ...]:
        """For each rank that does not have it on its own node: where it is."""
        missing = [rank for rank in range(self.world_size) if rank not in self.own[step]]
        return tuple(m.MissingSnapshot(rank, self.elsewhere[step].get(rank, "")) for rank in missing)


def in_memory(run: RunState) -> InMemory:
    """Return what the members hold, all from the same life.

    A node that missed the last start may hold steps that were computed anew without it: its copies do not count.
    """
    found = InMemory(run.world_size)
    for member in run.members:
        agent = run.agents[member.node]
        if agent.known == m.NO_LIFE or agent.known != run.last_life:
            continue
        ranks = range(member.first_rank, member.first_rank + member.local_world_size)
        for held in agent.held:
            if held.world_size != run.world_size or held.rank >= run.world_size:
                continue
            if held.rank in ranks and not held.is_copy:
                found.own[held.step].add(held.rank)
            elif agent.copy_port:
                found.elsewhere[held.step][held.rank] = f"{member.address}:{agent.copy_port}"
    return found
