"""The controller's part for the agents that are here, and what they know from an earlier controller. Pure."""

from __future__ import annotations

from msgspec import Struct

from resilio_hpc.launch.controller.checkpoints import replica_placement
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import MAX_LOSSES, KnownAgent, Phase
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER


class Arrival(Struct, frozen=True):
    """A Hello. ``replaced``: when the node's former agent was last heard; None without one."""

    agent: KnownAgent
    replaced: float | None


class Presence:
    """Takes note of what agents tell about themselves."""

    def __init__(self, run: RunState, out: Outbox) -> None:
        self._run = run
        self._out = out
        self._adopted: tuple[int, int] = (-1, -1)  # (epoch, round) of the newest soft state taken over

    @property
    def has_adopted(self) -> bool:
        """Return whether the soft state of an earlier controller was taken over."""
        return self._adopted[0] >= 0

    def hello(self, hello: m.Hello) -> Arrival:
        """Take note of an agent that is here, perhaps not for the first time."""
        run = self._run
        now, known = run.now(), run.agents.get(hello.node)
        run.left.discard(hello.node)
        if known is not None and known.hello.incarnation == hello.incarnation:  # the agent only lost its connection
            known.heard = now
            known.hello = hello  # the node may have fewer devices now
            return Arrival(known, None)
        agent = run.agents[hello.node] = KnownAgent(hello, now, now)
        run.voters_changed = True
        self._out.record("agent_joined", node=hello.node, incarnation=hello.incarnation, address=hello.address)
        return Arrival(agent, None if known is None else known.heard)

    def answered(self, agent: KnownAgent) -> None:
        """Take note of a message other than Hello, which proves that the agent hears the controller."""
        agent.heard = agent.answered = self._run.now()
        if not agent.answers:
            agent.answers = True
            self.take_back()

    def take_back(self) -> None:
        """Use a lost node that is back as a spare, unless it was lost too often."""
        run = self._run
        for node in sorted(run.lost & run.agents.keys()):  # the report of its loss may come after its Hello
            if run.agents[node].answers and run.losses.get(node, 0) <= MAX_LOSSES:
                run.lost.discard(node)
                self._out.record("node_returned", node=node, losses=run.losses.get(node, 0))

    def adopt(self, hello: m.Hello) -> bool:
        """Take over the soft state of an earlier controller if it is the newest so far. Return whether it was."""
        run = self._run
        run.learn(hello.committed)
        last = hello.last
        if run.phase is not Phase.GATHERING or run.has_prepared:
            return False
        run.round = max(run.round, hello.prepared)
        if last is None or last.epoch >= run.epoch:
            return False
        run.steps_reported = run.steps_reported or last.steps_reported  # only members know it from the first step on
        if (last.epoch, last.round) <= self._adopted:
            return False
        self._adopted = (last.epoch, last.round)
        run.adopt(last)
        return True

    def heartbeat(self, agent: KnownAgent, beat: m.Heartbeat) -> None:
        """Take note of what an agent's ranks do, and of the newest Beat that it got."""
        run = self._run
        if beat.epoch == run.epoch:
            now = run.now()
            if beat.echo <= now:
                agent.echo = max(agent.echo, beat.echo)
                if beat.unix > 0 and beat.echo != NEVER:
                    agent.clock.heard(beat.unix, beat.echo + beat.echo_age_s, now)
            agent.round = beat.round
            if beat.round == run.round:
                agent.step = max(agent.step, beat.step)
                agent.step_time = beat.step_time
                agent.finishing = beat.finishing
                agent.calls = beat.calls
                agent.section = beat.section
        agent.sent = beat.sent
        agent.ready = beat.ready
        if beat.copy_port != agent.copy_port:
            agent.copy_port = beat.copy_port
            self._tell_copier(agent.hello.node)
        agent.memory_level, agent.memory = beat.memory_level, beat.memory
        run.attached |= beat.attached

    def _tell_copier(self, node: str) -> None:
        """Tell the member that copies a node's snapshots where they are."""
        run = self._run
        copier = replica_placement.copier_of(node, run) if run.with_ranks and run.config.replica_copies else None
        partner = None if copier is None else replica_placement.partner_of(copier, run)
        if copier is not None and partner is not None:
            self._out.send(copier.node, m.KeepCopies(run.epoch, run.round, partner))

    def left(self, message: m.Goodbye) -> None:
        """Take note that an agent has left in this epoch."""
        run = self._run
        run.left.add(message.node)
        run.voters_changed = True
        self._out.record("agent_left", node=message.node, reason=message.reason)
