"""Virtual partner copies: what a replicator keeps for other nodes, and fetches for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.local_round import LocalRound
from resilio_hpc.launch.message_parts import Partner

if TYPE_CHECKING:
    from virtual_cluster.agent import VirtualAgent
    from virtual_cluster.world import Snapshot, World

Key = tuple[int, int]  # (rank, step)


class VirtualCopies:
    """They end with their agent. Fetches take their time; one that is given up has no effect."""

    def __init__(self, agent: VirtualAgent, world: World) -> None:
        self.kept: dict[Key, Snapshot] = {}
        self._agent, self._world = agent, world
        self._generation = 0
        self._copying = 0

    def held(self) -> tuple[m.Held, ...]:
        return tuple(m.Held(*key, copy.world_size, True) for key, copy in sorted(self.kept.items(), key=lambda x: x[0]))

    def forget_after(self, step: int) -> None:
        self.give_up()
        self.kept = {key: copy for key, copy in self.kept.items() if key[1] <= step}

    def give_up(self) -> None:
        self._generation += 1

    def keep(self, partner: Partner, step: int, world_size: int) -> None:
        """As ``partner_copies.PartnerCopies.keep``."""
        ranks = range(partner.first_rank, partner.first_rank + partner.ranks)
        if all((rank, step) in self.kept and self.kept[rank, step].world_size == world_size for rank in ranks):
            return
        self._copying += 1
        copying = self._copying
        newest = max((kept for _, kept in self.kept), default=-1)
        self.kept = {key: copy for key, copy in self.kept.items() if key[1] == newest}

        def arrived() -> None:
            if copying != self._copying:
                return
            found = {(rank, step): self._at(partner.endpoint, (rank, step), world_size) for rank in ranks}
            whole = {key: copy for key, copy in found.items() if copy is not None}
            if len(whole) == len(found):
                self.kept = {key: copy for key, copy in self.kept.items() if key[0] in ranks} | whole

        self._later(arrived)

    def bring(self, wanted: Sequence[m.Fetch], start: m.Start, local: LocalRound, then: Callable[[], None]) -> None:
        """As ``partner_copies.PartnerCopies.fetch``."""
        restore, world_size = start.restore, sum(member.local_world_size for member in start.state.members)
        assert restore is not None

        def arrived() -> None:
            for fetch in wanted:
                copy = self._at(fetch.endpoint, (fetch.rank, restore.step), world_size)
                if copy is None:
                    self._world.record("not_fetched", {"node": self._agent.node, "step": restore.step})
                    self._agent.core.copies_failed(local.number, restore, "said nothing for 10 s")
                    return
                self._agent.site.memory[fetch.rank, restore.step] = copy
            self._world.record("fetched", {"node": self._agent.node, "step": restore.step})
            then()

        self._later(arrived)

    def _later(self, call: Callable[[], None]) -> None:
        generation = self._generation

        def act() -> None:
            if generation == self._generation:
                self._agent.event(call)

        self._world.after(self._world.copy_s(), act)

    def _at(self, endpoint: str, key: Key, world_size: int) -> Snapshot | None:
        """What the replicator there gives, if we reach it."""
        found = self._world.reached(self._agent.node, endpoint.rpartition(":")[0])
        if found is None:
            return None
        for copy in (found.site.memory.get(key), found.copies.kept.get(key)):
            if copy is not None and copy.world_size == world_size:
                return copy
        return None
