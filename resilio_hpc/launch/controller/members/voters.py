"""The controller's part for votes: which nodes vote, whether a quorum is with it, and the leases. Pure.

An agent echoes the stamp of the newest Beat that it got, which proves that it supported the controller then. Each voter
stands by its controller for the heartbeat timeout after its last Beat. So no other node can have been elected while a
quorum's stamps are younger than that. No lease reaches beyond ``run_state.LEASE_SHARE`` of it.
"""

from __future__ import annotations

from collections.abc import Collection

from resilio_hpc.launch.controller.facts.intents import Intend, VotersSettled
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import KnownAgent
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, Membership, has_quorum, next_membership, quorum_since, settled
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList

RESEND_S = 0.5
COUNTED_PER_S = 100_000  # agents per second: counting thousands takes milliseconds
RESENT_PER_S = 1000  # agents per second: of thousands, each gets it less often


class Voters:
    """Follows which agents support the controller, one joint membership at a time."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._witnessed: tuple[tuple[str, ...], ...] = ()
        self._joint_settled = False
        self._kept: set[str] = set()
        self._next_send = self._next_count = self._next_proposal = run.now()
        if run.term.witnessed:
            self.hold_witness(run.term.supporters)

    def hold_witness(self, supporters: Collection[str]) -> None:
        """Take note that this controller holds the witness, so half of the nodes is a quorum.

        The other half may not vote.
        """
        groups = self._run.membership.groups
        self._witnessed = tuple(group for group in groups if 2 * len(set(supporters) & set(group)) == len(group))
        voters = NodeList.of([entry for entry in self._wanted().entries() if entry.node in supporters])
        self._begin(next_membership(self._run.membership, self._run.epoch, voters, settled=False))

    # -- quorum ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count the supporters; propose and settle memberships."""
        run = self._run
        now = run.now()
        agents = run.agents
        led = run.leads
        if now < self._next_count:
            return
        pause_s = run.config.heartbeat_timeout_s / (40 if led else 500)
        self._next_count = now + max(pause_s, len(agents) / COUNTED_PER_S)

        def supported(node: str) -> float:
            agent = agents.get(node)
            # the controller's own agent, too, may have promised its vote to another
            return agent.echo if agent is not None else NEVER

        since = quorum_since(run.membership, supported, self._witnessed)
        run.supported_since = max(run.supported_since, since)
        if run.leads and not led:
            self._renew_leases()
        self._settle()
        if not run.leads:
            return
        if run.membership.epoch < run.epoch:  # the nodes that came have told their addresses
            self._begin(next_membership(run.membership, run.epoch, self._wanted(), settled=False))
            run.voters_changed = False
        elif self._joint_settled and run.voters_changed and now >= self._next_proposal:
            self._next_proposal = now + self._pause_s
            self._propose()
        if now >= self._next_send:
            self._next_send = now + self._pause_s
            order = m.UpdateVoters(run.epoch, run.membership)  # one object, so that it is encoded once
            for node in sorted(run.membership.nodes - self._kept):
                if node in agents:
                    self._out.send(node, order)

    @property
    def _pause_s(self) -> float:
        return RESEND_S + len(self._run.agents) / RESENT_PER_S

    # -- leases ------------------------------------------------------------------------------------------------

    def _renew_leases(self) -> None:
        """Renew all leases once a quorum is with the controller (again), without waiting for the next Heartbeats."""
        for node, agent in self._run.agents.items():
            self.renew_lease(node, agent)

    def renew_lease(self, node: str, agent: KnownAgent) -> None:
        """Answer the agent's newest Heartbeat with a lease for its ranks."""
        if agent.sent is not None:
            now = self._run.now()
            self._out.send(node, m.Beat(self._run.epoch, agent.sent, self._run.lease_s, now))

    # -- memberships -------------------------------------------------------------------------------------------

    def kept(self, node: str, number: int) -> None:
        """Take note that an agent has the current membership on its disk."""
        if number == self._run.membership.number:
            self._kept.add(node)
            if not self._joint_settled and 2 * len(self._kept) > len(self._run.membership.voters.nodes):
                self._next_count = self._run.now()  # the membership may be settled now

    def _settle(self) -> None:
        """Settle a joint membership that a quorum of all its groups has kept: the former voters lose their votes."""
        membership = self._run.membership
        if self._joint_settled or membership.epoch < self._run.epoch:
            return
        if not has_quorum(membership, self._kept, self._witnessed):
            return
        if membership.before:
            self._begin(settled(membership))
        else:
            self._joint_settled = self._run.voters_known = True
            self._witnessed = ()
            self._intend(VotersSettled())

    def _propose(self) -> None:
        membership = self._run.membership
        self._run.voters_changed = False
        wanted = self._wanted()
        if wanted != membership.voters and wanted.nodes:
            self._begin(next_membership(membership, self._run.epoch, wanted, settled=True))

    def _wanted(self) -> NodeList:
        """Return all nodes that are admitted, and the nodes to come that were not lost."""
        run = self._run
        gone = run.lost | run.left
        ranks = {member.node: member.node_rank for member in run.members}
        known = {entry.node: entry for entry in run.membership.voters.entries() if entry.node not in gone}
        for node, agent in run.agents.items():
            host, _, port = agent.hello.endpoint.rpartition(":")
            if node not in gone:
                known[node] = NodeEntry(node, host, int(port) if port.isdigit() else 0)
        # joiners leave first, so they come last
        joiners = {node for node, agent in run.agents.items() if agent.hello.joiner}

        def turn(entry: NodeEntry) -> tuple[bool, int, str]:
            return (entry.node in joiners, ranks.get(entry.node, len(ranks)), entry.node)

        return NodeList.of(sorted(known.values(), key=turn))

    def _begin(self, membership: Membership) -> None:
        self._run.membership = membership
        self._kept = set()
        self._joint_settled = False
        self._next_send = self._run.now()
        if not membership.before:
            self._out.record("voters", nodes=list(membership.voters.nodes))
