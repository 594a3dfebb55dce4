"""The controller's part for votes: who has one, whether a quorum is with us, and how long leases may last. Pure.

A voter's support is proven by what it echoes: the stamp of a Beat that it got from us. Until a quorum's stamps are no
older than the heartbeat timeout, nobody else can have been elected, since a voter stands by its controller for that
long after the last Beat. No lease that we give reaches beyond ``LEASE_SHARE`` of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, Membership, has_quorum, next_membership, quorum_since, settled
from resilio_hpc.launch.protocol.node_list import Entry, Roster

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller
    from resilio_hpc.launch.protocol.vote import Term

LEASE_SHARE = 0.8  # of the time after which we may be replaced: ranks must be gone by then, whatever the clocks do
RESEND_S = 0.5
COUNTED_PER_S = 100_000  # agents: with thousands, to count them takes milliseconds
RESENT_PER_S = 1000  # agents: thousands are told less often


class Enrolment:
    """Follows the agents that are with us, one joint membership at a time."""

    def __init__(self, controller: Controller, term: Term) -> None:
        self._controller = controller
        self._witnessed: tuple[tuple[str, ...], ...] = ()
        self.membership = term.membership  # until a quorum is with us
        self.suspended = False  # another job of the run may lead by now
        self.known = False  # a quorum has kept a membership of this epoch
        self._joint_settled = False
        self._kept: set[str] = set()
        self._supported_since = NEVER
        self._next_send = self._next_count = self._next_proposal = controller.now()
        self.changed = True  # somebody came or went, or has another rank
        if term.witnessed:
            self.witness(term.supporters)

    def witness(self, supporters: Collection[str]) -> None:
        """The witness stands on our side: exactly half is enough, and the other half has no vote in what follows."""
        groups = self.membership.groups
        self._witnessed = tuple(group for group in groups if 2 * len(set(supporters) & set(group)) == len(group))
        voters = Roster.of([entry for entry in self._wanted().entries() if entry.node in supporters])
        self._begin(next_membership(self.membership, self._controller.epoch, voters, settled=False))

    # -- quorum ------------------------------------------------------------------------------------------------

    @property
    def since(self) -> float:
        """The latest time at which a quorum was with us for certain, as of the last tick."""
        return self._supported_since

    @property
    def leads(self) -> bool:
        """Whether leases that we give now are worth something; without it nothing is decided."""
        return self.lease_end > self._controller.now() and not self.suspended

    @property
    def lease_end(self) -> float:
        """Until when ranks may run at all, on our clock."""
        return self._supported_since + LEASE_SHARE * self._controller.config.heartbeat_timeout_s

    @property
    def lease_s(self) -> float:
        """How long ranks may run from now on."""
        return max(0.0, self.lease_end - self._controller.now()) if self.leads else 0.0

    def tick(self) -> None:
        """See who is with us; propose and settle memberships."""
        controller = self._controller
        now = controller.now()
        agents = controller.agents
        led = self.leads
        if now < self._next_count:
            return
        pause_s = controller.config.heartbeat_timeout_s / (40 if led else 500)
        self._next_count = now + max(pause_s, len(agents) / COUNTED_PER_S)

        def supported(node: str) -> float:
            agent = agents.get(node)
            return agent.echo if agent is not None else NEVER  # our own agent, too, may have promised itself to others

        since = quorum_since(self.membership, supported, self._witnessed)
        self._supported_since = max(self._supported_since, since)
        if self.leads and not led:
            controller.renew_leases()
        self._settle()
        if not self.leads:
            return
        if self.membership.epoch < controller.epoch:  # those that came give us their addresses
            self._begin(next_membership(self.membership, controller.epoch, self._wanted(), settled=False))
            self.changed = False
        elif self._joint_settled and self.changed and now >= self._next_proposal:
            self._next_proposal = now + self._pause_s
            self._propose()
        if now >= self._next_send:
            self._next_send = now + self._pause_s
            order = m.Enrol(controller.epoch, self.membership)  # one object, so that it is encoded once
            for node in sorted(self.membership.nodes - self._kept):
                if node in agents:
                    controller.send(node, order)

    @property
    def _pause_s(self) -> float:
        return RESEND_S + len(self._controller.agents) / RESENT_PER_S

    # -- memberships -------------------------------------------------------------------------------------------

    def kept(self, node: str, number: int) -> None:
        """An agent has the current membership on its disk."""
        if number == self.membership.number:
            self._kept.add(node)
            if not self._joint_settled and 2 * len(self._kept) > len(self.membership.voters.nodes):
                self._next_count = self._controller.now()  # it may be settled now

    def _settle(self) -> None:
        """A joint membership that a quorum of all its groups has kept gives way to its voters alone."""
        if self._joint_settled or self.membership.epoch < self._controller.epoch:
            return
        if not has_quorum(self.membership, self._kept, self._witnessed):
            return
        if self.membership.before:
            self._begin(settled(self.membership))
        else:
            self._joint_settled = self.known = True
            self._witnessed = ()
            self._controller.tenure.enrolled()

    def _propose(self) -> None:
        self.changed = False
        wanted = self._wanted()
        if wanted != self.membership.voters and wanted.nodes:
            self._begin(next_membership(self.membership, self._controller.epoch, wanted, settled=True))

    def _wanted(self) -> Roster:
        """Everybody who is admitted, and whoever has not come yet but was not lost either."""
        controller = self._controller
        gone = controller.lost | controller.left
        ranks = {member.node: member.node_rank for member in controller.members}
        known = {entry.node: entry for entry in self.membership.voters.entries() if entry.node not in gone}
        for node, agent in controller.agents.items():
            host, _, port = agent.hello.endpoint.rpartition(":")
            if node not in gone:
                known[node] = Entry(node, host, int(port) if port.isdigit() else 0)
        joiners = {node for node, agent in controller.agents.items() if agent.hello.joiner}  # they will go: last

        def turn(entry: Entry) -> tuple[bool, int, str]:
            return (entry.node in joiners, ranks.get(entry.node, len(ranks)), entry.node)

        return Roster.of(sorted(known.values(), key=turn))

    def _begin(self, membership: Membership) -> None:
        self.membership = membership
        self._kept = set()
        self._joint_settled = False
        self._next_send = self._controller.now()
        if not membership.before:
            self._controller.record("voters", nodes=list(membership.voters.nodes))
