"""The controller: decides rounds, recovery, commits and stops. A pure state machine over messages.

It reads no clock but the one it is given, does no I/O, and returns actions; agents carry them out. All it knows is
soft state that agents send again when they (re)connect, so any agent can become the next controller.

Life of a round: ``gathering`` (who is in?) → ``preparing`` (old ranks stop, the store opens) → ``starting`` (ranks
run, first step not yet seen) → ``running``. A failure leads back to gathering with an open **recovery**, which closes
with the first step that all ranks complete. ``ended``: the verdict is said, and every agent is let go.

Its subjects have a part each. Parts share the facts in ``run_state`` and queue actions in an ``outbox``. Only
``rounds`` knows another part. What a part wants of another is an **intent**, which ``_carry_out`` turns into a call.
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import assert_never

from resilio_hpc.launch.controller.checkpoints.checkpoint_phase import CheckpointMessage, CheckpointPhase
from resilio_hpc.launch.controller.checkpoints.replica_check import ReplicaCheck
from resilio_hpc.launch.controller.facts import intents as i
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Action, Clock, ControllerConfig, KnownAgent, Phase, RunHistory
from resilio_hpc.launch.controller.faults.failures import Failures
from resilio_hpc.launch.controller.faults.hangs import Hangs
from resilio_hpc.launch.controller.faults.memory_alerts import MemoryAlerts
from resilio_hpc.launch.controller.faults.slow_ranks import SlowRanks
from resilio_hpc.launch.controller.members.environment import Environments
from resilio_hpc.launch.controller.members.gathering import Gathering
from resilio_hpc.launch.controller.members.leadership import Leadership
from resilio_hpc.launch.controller.members.membership_change import MembershipChange
from resilio_hpc.launch.controller.members.node_tests import NodeTests
from resilio_hpc.launch.controller.members.presence import Presence
from resilio_hpc.launch.controller.members.shutdown import Shutdown
from resilio_hpc.launch.controller.members.stop_phase import StopPhase
from resilio_hpc.launch.controller.members.voters import Voters
from resilio_hpc.launch.controller.rounds import Rounds
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import Term

MAX_AGENTS = 20_000
OfEpoch = m.RankFailed | CheckpointMessage | m.Warned | m.Leaving | m.VotersUpdated | m.OfNode | m.OfRound


class Controller:
    """The controller of a run. ``handle`` takes a message, ``tick`` the passing of time; both return actions."""

    def __init__(self, config: ControllerConfig, term: Term, clock: Clock) -> None:
        run = self.run = RunState(config, term, clock)
        out = self._out = Outbox(run.agents)
        self.presence = Presence(run, out)
        self.voters = Voters(run, out, self._carry_out)
        self.leadership = Leadership(run, out, self._carry_out)
        self.checkpoints = CheckpointPhase(run, out, self._carry_out)
        self.rounds = Rounds(run, out, self._carry_out, self.checkpoints)
        self.gathering = Gathering(run, out, self._carry_out)
        self.failures = Failures(run, out, self._carry_out)
        self.hangs = Hangs(run, out, self._carry_out)
        self.slow = SlowRanks(run, out, self._carry_out)
        self.replicas = ReplicaCheck(run, out, self._carry_out)
        self.membership_change = MembershipChange(run, out, self._carry_out)
        self.memory_alerts = MemoryAlerts(run, out)
        self.tests = NodeTests(run, out, self._carry_out)
        self.stop = StopPhase(run, out, self._carry_out)
        self.environments = Environments(run, out, self._carry_out)
        self.shutdown = Shutdown(run, out)

    def begin(self) -> list[Action]:
        """Announce the election to the agents that voted for this controller."""
        for node in sorted(self.run.term.supporters - {self.run.node}):
            self._welcome(node)
        return self._out.take()

    def handle(self, message: m.ToController) -> list[Action]:
        """Take one message from an agent."""
        run = self.run
        agent = run.agents.get(message.node)
        if isinstance(message, m.Hello):
            if message.epoch == run.epoch and (agent is not None or len(run.agents) < MAX_AGENTS):
                self._on_hello(message)
        elif agent is None:
            pass  # the agent has not said Hello: it will, when it gets no Beats
        else:
            self.presence.answered(agent)
            if isinstance(message, m.Heartbeat):
                self._on_heartbeat(agent, message)
            elif isinstance(message, m.Goodbye):
                self._on_goodbye(message)
            elif isinstance(message, (m.NoLeader, m.Vote)):  # a union would be built for each message
                pass  # it is for the agent in this process
            elif message.epoch == run.epoch and run.phase is not Phase.ENDED:
                self._dispatch(agent, message)
        return self._out.take()

    def tick(self, behind: bool = False) -> list[Action]:
        """Let time pass: lost nodes, slow starts, due stops. ``behind``: unread messages wait."""
        run = self.run
        self.voters.tick()
        if run.phase is Phase.ENDED:
            self.shutdown.let_go()
        elif self.leadership.is_over:
            self.leadership.step_down()
        else:
            self.shutdown.end_when_led()
            self.gathering.go_on_uninformed(self.presence.has_adopted)
            if not behind:  # a node's sign of life may be among the unread messages
                self.failures.find_lost_nodes()
            if run.phase is Phase.GATHERING:
                self.gathering.try_round()
            elif run.phase in (Phase.PREPARING, Phase.STARTING):
                self.rounds.watch()
            elif run.phase is Phase.RUNNING:
                self.membership_change.part_with_leavers()
                self.failures.forgive()
            if run.with_ranks:
                self.checkpoints.tick()
                self.failures.tick()
                self.failures.find_left_out()
            parts = self.hangs, self.slow, self.memory_alerts, self.environments, self.stop, self.tests, self.replicas
            for part in parts:
                part.tick()
        return self._out.take()

    def inform(self, past: RunHistory) -> list[Action]:
        """Take the run directory's report, at the beginning and after QueryHistory."""
        run = self.run
        self.gathering.inform(past.committed, past.last_round)
        self.hangs.limits.take_up(past.limits, past.order)
        self.checkpoints.past_told()
        self.leadership.informed()
        if past.verdict is not None and run.phase is not Phase.ENDED:
            self.shutdown.adopt(*past.verdict)
        self.gathering.try_round()
        self.rounds.try_start()
        return self._out.take()

    def epoch_recorded(self) -> list[Action]:
        """Take note that the epoch's file is durable."""
        self.leadership.epoch_recorded()
        return self._out.take()

    def witness_claimed(self, witness: str, holder: str | None) -> list[Action]:
        """Take note of the holder of the witness; None: the run directory did not answer."""
        self.leadership.witness_claimed(witness, holder)
        return self._out.take()

    def verdict_written(self) -> list[Action]:
        """Release all agents, the controller's own last, so that no message is lost: the verdict is durable."""
        self.shutdown.release()
        return self._out.take()

    def let(self, act: Callable[[], None]) -> list[Action]:
        """Let a part take what its host brings; return what follows."""
        act()
        return self._out.take()

    def _carry_out(self, intent: i.Intent) -> None:
        """Carry out at once the intent of a part."""
        match intent:
            case i.TryRound():
                self.gathering.try_round()
            case i.PrepareRound():
                self.rounds.prepare(intent.members)
            case i.StepCommitted():
                self.rounds.end_when_saved()
                self.membership_change.committed()
            case i.StepAbandoned():
                self.rounds.end_when_saved()
            case i.StartingRanks():
                self.failures.starting_ranks()
            case i.SlowStart():
                self.failures.slow_start()
            case i.HangFound() | i.CorruptionFound():
                self.failures.ranks_blamed(intent)
            case i.Recovered():
                self.failures.close(intent.at, intent.restored)
            case i.VotersSettled():
                self.leadership.voters_settled()
            case i.HoldWitness():
                self.voters.hold_witness(self.run.agents)
            case i.MayCommit():
                self.checkpoints.epoch_recorded()
            case i.RepeatStop():
                self.stop.repeat(intent.node)
            case i.LetLeaversGo():
                self.membership_change.let_leavers_go()
            case i.NodeUnfit():
                self.failures.node_unfit(intent.node)
            case i.PauseAndTest() | i.TestSuspects():
                self.tests.begin(intent)
            case i.PartWithUnfit():
                self.membership_change.part_with_unfit(intent.at_once)
            case i.EndStopped():
                self.stop.end()
            case i.EndRun():
                self.shutdown.end_run(intent)
            case i.EndAlone():
                self.shutdown.end_alone(intent)
            case _:
                assert_never(intent)

    # -- messages ----------------------------------------------------------------------------------------------

    def _dispatch(self, agent: KnownAgent, message: OfEpoch) -> None:
        """Take a message of this epoch."""
        match message:
            case m.RankFailed():
                self.failures.rank_failed(message)
            case m.SnapshotWhole() | m.StepPersisted() | m.PersistFailed() | m.ManifestWritten():
                self.checkpoints.handle(message)
            case m.Warned():
                self.stop.warned(message.signal, message.node)
            case m.Leaving():
                self.membership_change.leaving(agent, message)
            case m.EnvironmentSeen():
                self.environments.seen(message)
            case m.DiskSeen():
                self.run.note_copies(message.node, message.copies)
            case m.VotersUpdated():
                self.voters.kept(message.node, message.number)
            case _:
                if message.round == self.run.round:  # otherwise it belongs to a round that is over
                    self._dispatch_of_round(agent, message)

    def _dispatch_of_round(self, agent: KnownAgent, message: m.OfRound) -> None:
        """Take a message of this round. A node that is no member of it may only stop its earlier ranks."""
        is_member = self.run.is_member(message.node)
        match message:
            case m.RanksStopped():
                self.failures.reached(message.completed)
                self.rounds.stopped(agent, message)
            case m.StoreOpened():
                self.rounds.store_ready(message)
            case m.StopAnswer():
                self.stop.answer(message)
                self.tests.answer(message)
            case m.RanksStarted():
                self.rounds.started(agent, message)
            case m.FirstStep():
                self.rounds.first_step(agent, message)
            case m.RanksSeen():
                self.hangs.seen(message)
                self.slow.seen(message)
            case m.RankRestarted():
                self.failures.alone.restarted(message)
            case m.RankTimes():
                self.slow.take(message)
            case m.ReplicasDigested() | m.ResultJudged():
                self.replicas.take(message)
            case m.RanksDone():
                if is_member and self.run.with_ranks:
                    agent.done = message
                    self.stop.member_done(message)
                    self.failures.member_done(message)
                    self.rounds.done(message)
            case _:
                assert_never(message)

    def _welcome(self, node: str) -> None:
        self._out.send(node, m.Welcome(self.run.epoch, self.run.node, self.run.term.endpoint))

    def _on_hello(self, hello: m.Hello) -> None:
        run, node = self.run, hello.node
        self._welcome(node)
        arrival = self.presence.hello(hello)
        if run.phase is Phase.ENDED:
            self.shutdown.say_again(node)
            return
        if self.presence.adopt(hello):
            self.gathering.adopt()
            if run.members:
                self.failures.controller_changed(hello.silent_s)
        self.presence.take_back()
        if arrival.replaced is not None and run.is_member(node):
            if run.with_ranks:
                self.failures.agent_restarted(node, arrival.replaced)
                return
            self.failures.note_restarted(node, arrival.replaced)
        if run.phase is Phase.GATHERING:
            self.gathering.came()
        else:
            self.rounds.came(arrival.agent, arrival.replaced is not None)

    def _on_heartbeat(self, agent: KnownAgent, beat: m.Heartbeat) -> None:
        if beat.incarnation != agent.hello.incarnation:
            return
        self.presence.heartbeat(agent, beat)
        self.voters.renew_lease(beat.node, agent)
        if self.run.phase is Phase.ENDED:
            self.shutdown.say_again(beat.node)

    def _on_goodbye(self, message: m.Goodbye) -> None:
        run, heard = self.run, self.run.agents.pop(message.node).heard
        if run.phase is Phase.ENDED:
            self.shutdown.let_go()
        elif message.epoch == run.epoch:
            self.presence.left(message)
            self.failures.nodes_gone([message.node], run.unix() - (run.now() - heard))
