"""Virtual partner copies: what a replicator keeps for other nodes, and fetches for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner
from resilio_hpc.launch.workers.local_round import LocalRound

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.ranks import Snapshot
    from tests.support.virtual_cluster.world import World

Key = tuple[int, int]  # (rank, step)
SILENT_S = 10.0
ASK_S, WAIT_S = 0.001, 0.05


class VirtualCopies:
    """They end with their agent. Whoever is asked gives what it has at that moment, which takes its time to arrive; a
    fetch that is given up has no effect."""

    def __init__(self, agent: VirtualAgent, world: World) -> None:
        self.kept: dict[Key, Snapshot] = {}
        self._agent, self._world = agent, world
        self.life = m.NO_LIFE
        self._generation = 0
        self._brings = -1  # the step that is on its way for ranks of this node
        self._then: list[Callable[[], None]] = []
        self._copying = 0
        self._partner: Partner | None = None  # whose records are followed

    def make_lost(self, step: int, then: Callable[[], None]) -> None:
        """As ``partner_copies.PartnerCopies.make_lost``: of records that may have come, and this node's snapshots."""
        partner, training = self._partner, self._world.trainings.get(self.life)
        if partner is None or training is None or not training.shares:
            then()
            return
        life = self.life

        def made() -> None:
            own = [copy for (_, its), copy in self._agent.site.memory.items() if its == step and copy.life == life]
            for rank in range(partner.first_rank, partner.first_rank + partner.ranks) if own else ():
                records = training.records(rank)[: None if self._world.has_come() else -1]
                record = lost_ranks.record_of(records, step, training.round, training.size)
                if record is not None and life == self.life:
                    self.kept[rank, step] = training.snapshot(rank, step, record.step)
            self._agent.event(then)

        self._later(self._world.makes_s(), made)

    def held(self) -> tuple[m.Held, ...]:
        return tuple(m.Held(*key, copy.world_size, True) for key, copy in sorted(self.kept.items(), key=lambda x: x[0]))

    def begin(self, life: m.Life, step: int) -> None:
        self.give_up()
        self.kept = {key: copy for key, copy in self.kept.items() if key[1] <= step}
        self.life = life

    def give_up(self) -> None:
        self._generation += 1
        self._brings, self._then = -1, []

    def when_brought(self, step: int, act: Callable[[], None]) -> None:
        """As ``partner_copies.PartnerCopies.when_brought``."""
        if step == self._brings:
            self._then.append(act)
        else:
            act()

    def keep(self, message: m.PersistStep, partner: Partner, world_size: int) -> None:
        """As ``partner_copies.PartnerCopies.keep``."""
        self._partner = partner
        step = message.step
        ranks = range(partner.first_rank, partner.first_rank + partner.ranks)
        if all((rank, step) in self.kept and self.kept[rank, step].world_size == world_size for rank in ranks):
            return
        self._copying += 1
        copying = self._copying
        newest = max((kept for _, kept in self.kept), default=-1)
        self.kept = {key: copy for key, copy in self.kept.items() if key[1] == newest}

        def arrived(found: dict[Key, Snapshot]) -> None:
            if copying == self._copying and len(found) == len(ranks):
                self.kept = {key: copy for key, copy in self.kept.items() if key[0] in ranks} | found

        self._ask(
            {(rank, step): partner.endpoint for rank in ranks}, world_size, (message.epoch, message.round), arrived
        )

    def bring(
        self, wanted: Sequence[m.MissingSnapshot], start: m.Start, local: LocalRound, then: Callable[[], None]
    ) -> None:
        """As ``partner_copies.PartnerCopies.fetch``."""
        restore, world_size = start.restore, sum(member.local_world_size for member in start.state.members)
        assert restore is not None
        self._brings = restore.step

        def arrived(found: dict[Key, Snapshot]) -> None:
            waiting, self._brings, self._then = self._then, -1, []
            if len(found) < len(wanted):
                self._world.record("not_fetched", {"node": self._agent.node, "step": restore.step})
                self._agent.core.ranks.copies_failed(local.number, restore, "said nothing for 10 s")
                return
            self._agent.site.memory |= found
            self._world.record("fetched", {"node": self._agent.node, "step": restore.step})
            for act in (then, *waiting):
                act()

        self._ask({(fetch.rank, restore.step): fetch.endpoint for fetch in wanted}, world_size, m.NO_LIFE, arrived)

    def _ask(
        self, wanted: dict[Key, str], world_size: int, life: m.Life, arrived: Callable[[dict[Key, Snapshot]], None]
    ) -> None:
        """``wanted``: key → endpoint. Who has not begun the life answers when it has."""
        silent_at = self._world.now + SILENT_S

        def ask() -> None:
            found = {}
            for key, endpoint in wanted.items():
                giver = self._world.reached(self._agent.node, endpoint.rpartition(":")[0])
                if giver is not None and giver.copies.life < life and self._world.now < silent_at:
                    self._later(WAIT_S, ask)
                    return
                copy = None if giver is None else giver.copies.given(key, world_size)
                if copy is not None:
                    found[key] = copy
            self._later(self._world.copy_s(), lambda: self._agent.event(lambda: arrived(found)))

        self._later(ASK_S, ask)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        generation = self._generation

        def act() -> None:
            if generation == self._generation:
                call()

        self._world.after(delay_s, act)

    def given(self, key: Key, world_size: int) -> Snapshot | None:
        """What another node gets of us."""
        for copy in (self._agent.site.memory.get(key), self.kept.get(key)):
            if copy is not None and copy.world_size == world_size:
                return copy
        return None
