"""The controller: decides rounds, recovery, commits and stops. A pure state machine over messages.

It reads no clock but the one it is given, does no I/O, and returns actions; agents carry them out. All it knows is
soft state that agents send again when they (re)connect, so any agent can become the next controller.

Life of a round: ``gathering`` (who is in?) → ``preparing`` (old ranks stop, the store opens) → ``starting`` (ranks
run, first step not yet seen) → ``running``. A failure leads back to gathering with an open **incident**, which closes
with the first step that all ranks complete. ``ended``: the verdict is said, and everybody is let go.

Its subjects have a module each: rounds, regrouping, incidents (failures), checkpoint_phase, stop_phase, enrolment
(votes), tenure, ending. This one holds what they share, and takes messages apart.
"""

from __future__ import annotations

from typing import Any, assert_never

from resilio_hpc.launch.controller.checkpoint_phase import CheckpointMessage, CheckpointPhase
from resilio_hpc.launch.controller.failures import Incidents
from resilio_hpc.launch.controller.leadership import Tenure
from resilio_hpc.launch.controller.membership_change import Regrouping
from resilio_hpc.launch.controller.rounds import Rounds
from resilio_hpc.launch.controller.shutdown import Ending
from resilio_hpc.launch.controller.state import (
    MAX_LOSSES,
    WITH_RANKS,
    Action,
    AskPast,
    Clock,
    ControllerConfig,
    KnownAgent,
    Past,
    Phase,
    Record,
    Send,
    check_transition,
)  # fmt: skip
from resilio_hpc.launch.controller.stop_phase import StopPhase
from resilio_hpc.launch.controller.voters import Enrolment
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import Term

MAX_AGENTS = 20_000
PAST_PATIENCE_S = 2.0  # how long the run directory may take to tell what other agents know as well
OfRound = m.RanksStopped | m.StoreReady | m.StopAnswer | m.RanksStarted | m.FirstStep | m.RanksDone
OfEpoch = m.RankFailed | CheckpointMessage | m.Warned | m.Leaving | m.Enrolled | OfRound


class Controller:
    """See the module's text. ``handle`` takes a message, ``tick`` the passing of time; both return actions."""

    def __init__(self, config: ControllerConfig, term: Term, clock: Clock) -> None:
        self.config = config
        self.term = term
        self.epoch = term.epoch
        self.node = term.node
        self.phase = Phase.GATHERING
        self.round = -1
        self._members: tuple[m.Member, ...] = ()
        self._member_nodes: frozenset[str] = frozenset()
        self.agents: dict[str, KnownAgent] = {}
        self.lost: set[str] = set()  # silent for too long
        self.losses: dict[str, int] = {}  # how often
        self.left: set[str] = set()  # said Goodbye
        self.restarts = 0
        self.without_progress = 0
        self.informed = False  # the run directory has told what it knows
        self.may_prepare = False  # so it has, or it hangs, and a round may do without
        self.now = clock.monotonic
        self.unix = clock.unix
        self.began = self.phase_began = self.now()
        self.checkpoints = CheckpointPhase(self)
        self.incidents = Incidents(self)
        self.rounds = Rounds(self)
        self.regrouping = Regrouping(self)
        self.stop = StopPhase(self)
        self.enrolment = Enrolment(self, term)
        self.tenure = Tenure(self)
        self.ending = Ending(self)
        self._adopted: tuple[int, int] = (-1, -1)  # (epoch, round) of the newest soft state taken over
        self._out: list[Action] = []

    # -- entry points ------------------------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        """Tell those who voted for us that we won."""
        for node in sorted(self.term.supporters - {self.node}):
            self.send(node, m.Welcome(self.epoch, self.node, self.term.endpoint))
        return self._flush()

    def handle(self, message: m.ToController) -> list[Action]:
        """Take one message from an agent."""
        agent = self.agents.get(message.node)
        if isinstance(message, m.Hello):
            if message.epoch == self.epoch and (agent is not None or len(self.agents) < MAX_AGENTS):
                self._on_hello(message)
        elif agent is None:
            pass  # we have not been introduced: it will say Hello when its beats stay away
        else:
            agent.heard = agent.answered = self.now()
            if not agent.answers:
                agent.answers = True
                self._take_back()
            if isinstance(message, m.Heartbeat):
                self._on_heartbeat(agent, message)
            elif isinstance(message, m.Goodbye):
                self._on_goodbye(message)
            elif isinstance(message, m.Orphan | m.Vote):
                pass  # for the agent that we live in
            elif message.epoch == self.epoch and self.phase is not Phase.ENDED:
                self._dispatch(agent, message)
        return self._flush()

    def tick(self, behind: bool = False) -> list[Action]:
        """Let time pass: lost nodes, slow starts, stops that are due. ``behind``: messages wait that were not read."""
        self.enrolment.tick()
        if self.phase is Phase.ENDED:
            self.ending.let_go()
        elif self.tenure.is_over:
            self.tenure.step_down()
        else:
            self.ending.finish_when_led()
            self._go_on_without_the_past()
            if not behind:  # a node's proof of life may be among what waits
                self.incidents.find_lost_nodes()
            if self.phase is Phase.GATHERING:
                self.rounds.try_round()
            elif self.phase in (Phase.PREPARING, Phase.STARTING):
                self.rounds.watch()
            elif self.phase is Phase.RUNNING:
                self.regrouping.part_with_leavers()
                self.incidents.forgive()
            if self.phase in WITH_RANKS:
                self.checkpoints.tick()
                self.incidents.tick()
                self.incidents.find_left_out()
            self.stop.tick(self.now(), self.unix())
        return self._flush()

    def epoch_recorded(self) -> list[Action]:
        """The epoch's file is durable."""
        self.tenure.epoch_recorded()
        return self._flush()

    def witness_claimed(self, witness: str, holder: str | None) -> list[Action]:
        """Whose the witness is; None: the run directory did not answer."""
        self.tenure.witness_claimed(witness, holder)
        return self._flush()

    def _go_on_without_the_past(self) -> None:
        """A hung run directory does not hold up a change of controller: the agents know what matters, mostly."""
        if not self.may_prepare and self._adopted[0] >= 0 and self.now() - self.began > PAST_PATIENCE_S:
            self.may_prepare = True
            self.record("uninformed", committed=list(self.checkpoints.known))

    def inform(self, past: Past) -> list[Action]:
        """What the run directory tells, at the beginning and after AskPast."""
        self.checkpoints.learn(past.committed)
        if self.phase is Phase.GATHERING:
            self.round = max(self.round, past.last_round)
        if not self.informed:
            self.informed = self.may_prepare = True
            self.record("informed", committed=sorted(past.committed), last_round=past.last_round)
        self.checkpoints.past_told()
        self.tenure.informed()
        if (
            past.verdict is not None and self.phase is not Phase.ENDED
        ):  # an earlier controller said it, not all have heard it
            self.ending.adopt(*past.verdict)
        self.rounds.try_round()
        self.rounds.try_start()
        return self._flush()

    def verdict_written(self) -> list[Action]:
        """The verdict is durable: every agent may go, our own last, so that no message dies with us."""
        self.ending.release()
        return self._flush()

    # -- messages ----------------------------------------------------------------------------------------------

    def _dispatch(self, agent: KnownAgent, message: OfEpoch) -> None:
        """Messages of this epoch."""
        match message:
            case m.RankFailed():
                self.incidents.rank_failed(message)
            case m.SnapshotWhole() | m.Persisted() | m.PersistFailed() | m.Committed():
                self.checkpoints.handle(message)
            case m.Warned():
                self.stop.warned(message.signal, message.node)
            case m.Leaving():
                self.regrouping.leaving(agent, message)
            case m.Enrolled():
                self.enrolment.kept(message.node, message.number)
            case m.RanksStopped() | m.StoreReady() | m.StopAnswer() | m.RanksStarted() | m.FirstStep() | m.RanksDone():
                if message.round == self.round:  # else of a round that is over
                    self._dispatch_of_round(agent, message)
            case _:
                assert_never(message)

    def _dispatch_of_round(self, agent: KnownAgent, message: OfRound) -> None:
        """Messages of this round. One that is no member of it may stop what ran before, and no more."""
        match message:
            case m.RanksStopped():
                self.rounds.stopped(agent, message)
            case m.StoreReady():
                self.rounds.store_ready(message)
            case m.StopAnswer():
                self.stop.answer(message)
            case m.RanksStarted():
                if self.is_member(message.node):
                    self.rounds.started(agent, message)
            case m.FirstStep():
                if self.is_member(message.node):
                    self.rounds.first_step(agent, message)
            case m.RanksDone():
                if self.is_member(message.node):
                    self.rounds.done(agent, message)
            case _:
                assert_never(message)

    def _on_hello(self, hello: m.Hello) -> None:
        known = self.agents.get(hello.node)
        self.left.discard(hello.node)
        self.send(hello.node, m.Welcome(self.epoch, self.node, self.term.endpoint))
        if known is not None and known.hello.incarnation == hello.incarnation:  # it only lost the connection
            known.heard = self.now()
            known.hello = hello  # it may have fewer devices now
            agent = known
        else:
            agent = KnownAgent(hello, self.now(), self.now())
            self.agents[hello.node] = agent
            self.enrolment.changed = True
            self.record("agent_joined", node=hello.node, incarnation=hello.incarnation, address=hello.address)
        if self.phase is Phase.ENDED:
            self.ending.say_again(hello.node)
            return
        self._adopt(hello)
        self._take_back()
        replaced = known is not None and agent is not known
        if known is not None and replaced and self.is_member(hello.node) and self.phase in WITH_RANKS:
            self.incidents.agent_restarted(hello.node, known.heard)
        else:
            if known is not None and replaced and self.is_member(hello.node):
                self.incidents.note_restarted(hello.node, known.heard)
            self.rounds.came(hello.node, agent, replaced)

    def _take_back(self) -> None:
        """A node that was lost is here again: it waits as a spare, unless that happens all the time."""
        for node in sorted(self.lost & self.agents.keys()):  # that it was lost may be heard after its Hello
            if self.agents[node].answers and self.losses.get(node, 0) <= MAX_LOSSES:
                self.lost.discard(node)
                self.record("node_returned", node=node, losses=self.losses.get(node, 0))

    def _adopt(self, hello: m.Hello) -> None:
        """Take over the soft state of an earlier controller from the agent that has the newest."""
        self.checkpoints.learn(hello.committed)
        last = hello.last
        if self.phase is not Phase.GATHERING or self.rounds.has_prepared:
            return
        self.round = max(self.round, hello.prepared)
        if last is None or last.epoch >= self.epoch or (last.epoch, last.round) <= self._adopted:
            return
        self._adopted = (last.epoch, last.round)
        self.round = max(self.round, last.round)
        self.members = last.members
        self.restarts = last.restarts
        self.without_progress = last.without_progress
        self.lost |= set(last.lost)
        self.losses |= dict(last.losses)
        self.left |= set(last.left) - self.agents.keys()
        self.checkpoints.learn(last.committed, last.bad_copies)
        self.rounds.adopt(last)
        if last.members:
            self.incidents.controller_changed(hello.silent_s)

    def _on_heartbeat(self, agent: KnownAgent, beat: m.Heartbeat) -> None:
        if beat.incarnation != agent.hello.incarnation:
            return
        now = self.now()
        if beat.epoch == self.epoch:
            if beat.echo <= now:
                agent.echo = max(agent.echo, beat.echo)
            agent.round = beat.round
            if beat.round == self.round:
                agent.step = max(agent.step, beat.step)
                agent.step_time = beat.step_time
        agent.sent = beat.sent
        agent.ready, agent.copy_port = beat.ready, beat.copy_port
        self.rounds.attached |= beat.attached
        self._renew_lease(beat.node, agent)
        if self.phase is Phase.ENDED:
            self.ending.say_again(beat.node)

    def renew_leases(self) -> None:
        """A quorum is with us (again): nobody should wait for the answer to its next Heartbeat."""
        for node, agent in self.agents.items():
            self._renew_lease(node, agent)

    def _renew_lease(self, node: str, agent: KnownAgent) -> None:
        if agent.sent is not None:
            now = self.now()
            self.send(node, m.Beat(self.epoch, agent.sent, self.enrolment.lease_s, now))

    def _on_goodbye(self, message: m.Goodbye) -> None:
        heard = self.agents.pop(message.node).heard
        if self.phase is Phase.ENDED:
            self.ending.let_go()
        elif message.epoch == self.epoch:
            self.left.add(message.node)
            self.enrolment.changed = True
            self.record("agent_left", node=message.node, reason=message.reason)
            self.incidents.nodes_gone([message.node], self.unix() - (self.now() - heard))

    # -- what the parts share ----------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[m.Member, ...]:
        """Who takes part in the current round, in the order of their node ranks."""
        return self._members

    @members.setter
    def members(self, members: tuple[m.Member, ...]) -> None:
        self._members = members
        self._member_nodes = frozenset(member.node for member in members)

    @property
    def world_size(self) -> int:
        """Ranks in the current round."""
        return sum(member.local_world_size for member in self.members)

    @property
    def max_step(self) -> int:
        """The furthest step that any node has reported in this round, -1: none."""
        return max((agent.step for agent in self.agents.values()), default=-1)

    def is_member(self, node: str) -> bool:
        """Whether the node takes part in the current round."""
        return node in self._member_nodes

    def state(self) -> m.RoundState:
        """The soft state that agents keep for the next controller."""
        return m.RoundState(
            self.epoch, self.round, m.world_of(self.members), self.restarts, self.without_progress,
            self.checkpoints.known, tuple(sorted(self.lost)), tuple(self.checkpoints.bad_copies),
            tuple(sorted(self.left)), self.rounds.steps_reported, tuple(sorted(self.losses.items())),
            self.incidents.broken_by,
        )  # fmt: skip

    def set_phase(self, phase: Phase) -> None:
        """Enter a phase."""
        check_transition(self.phase, phase)
        self.phase = phase
        self.ending.forget()
        self.phase_began = self.now()

    def act(self, action: Action) -> None:
        """Queue an action."""
        self._out.append(action)

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queue a message."""
        self._out.append(Send(node, message))

    def broadcast(self, message: m.ToAgent) -> None:
        """Queue a message to every agent."""
        for node in self.agents:
            self.send(node, message)

    def ask_past(self) -> None:
        """Queue a question to the run directory."""
        self._out.append(AskPast())

    def record(self, kind: str, /, **fields: Any) -> None:
        """Queue a ledger entry."""
        self._out.append(Record(kind, fields))

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
