"""The agent's decisions: which controller to follow, when to send, how to obey its orders. Pure.

It hands orders for the ranks to ``node_ranks``, and what concerns leadership to ``consensus.follower``. Everything that
touches the world goes through ``Ports``, which the real agent implements with sockets and processes and a simulator
with virtual ones.
"""

from __future__ import annotations

import msgspec
from typing_extensions import assert_never

from resilio_hpc.launch.agent.decisions.agent_ports import NO_GRACE, Ports
from resilio_hpc.launch.agent.decisions.heartbeat import beat_interval_s, heartbeat
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.agent.decisions.stop_warnings import StopWarnings
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.consensus.follower import Succession
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord

AHEAD_SHARE = 0.25  # of the heartbeat timeout, before a lease ends: ranks are asked to save then


class AgentCore:
    """The decisions of one node's agent. ``hello`` is completed each time that it is sent.

    ``joiner``: the node belongs to another job than the run's, and leaves when that job ends. ``leaves_in_s``: seconds
    until then, if known.
    """

    def __init__(
        self, hello: m.Hello, job: str, vote_record: VoteRecord, ports: Ports, heartbeat_timeout_s: float,
        joiner: bool = False, leaderless_limit_s: float = 300.0, begins: int = 0, graces: Graces = NO_GRACE,
        stop_grace_s: float = 10.0,
    ) -> None:  # fmt: skip
        self.node = hello.node
        self.ranks = NodeRanks(hello.node, hello.local_world_size, hello.last, ports, graces)
        self.joiner = joiner
        self.warnings = StopWarnings(joiner, stop_grace_s)
        self._ports = ports
        self._hello = msgspec.structs.replace(hello, joiner=joiner)
        self._leaderless_limit_s = leaderless_limit_s
        self._succession = Succession(
            hello.node, "" if joiner else job, hello.endpoint, vote_record, heartbeat_timeout_s, ports, self, begins
        )
        self._timeout = heartbeat_timeout_s
        self._next_beat = self._next_abandon = 0.0
        self._welcomed = False
        self._led: tuple[int, float] = (0, 0.0)  # this node's own last epoch, and since when it had no quorum
        self._echo, self._echoed_at = NEVER, 0.0  # the newest stamp of this epoch's controller, and when it came
        self._lost_at: float | None = None  # since when no controller is known to live
        self._saved_at = NEVER  # ahead of the end of a lease

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: heartbeats, the end of a lease, the search for another controller."""
        now = self._ports.monotonic()
        if self.ranks.ending is None:
            self._succession.tick(now)
            self._abandon_when_alone(now)
            if self.warnings.overdue(now) and self.ranks.ending is None:
                self.ranks.end(m.End(self.ranks.epoch, "terminated", 143))
        if now >= self._next_beat and self._may_follow() and self.ranks.ending is None:
            self._next_beat = now + self.beat_interval_s
            if self._welcomed and self._succession.in_contact:
                self._beat()
            elif not self._succession.contacts:
                self._next_beat = now + max(self.beat_interval_s, self._succession.state.repeat_s)
                self._say_hello(now)
        if self.ranks.alive and now > self.ranks.lease and self.ranks.ending is None:
            self.ranks.end_lease()
        elif self.ranks.local is not None and now > self.ranks.lease - AHEAD_SHARE * self._timeout > self._saved_at:
            self._saved_at = now
            self._ports.services.save_last_step(self.ranks.local, "shared", ahead=True)

    @property
    def beat_interval_s(self) -> float:
        """Return the seconds between two Heartbeats."""
        return beat_interval_s(self._timeout, len(self.vote_record.membership.voters.nodes))

    def _may_follow(self) -> bool:
        """Return whether a controller is known that no promise to a later epoch forbids to follow."""
        following = self._succession.following
        return following is not None and following.epoch >= self.vote_record.promised

    def _abandon_when_alone(self, now: float) -> None:
        """Write the verdict of a job without a quorum, when none came together for long enough."""
        if self._succession.in_contact:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now
        elif now - self._lost_at > self._leaderless_limit_s and now >= self._next_abandon:
            self._next_abandon = now + 1.0
            if self.joiner:
                self.ranks.end(m.End(self.ranks.epoch, "left", 0))
            elif (newest := self._succession.newest_without_leader(now)) is not None:
                self._ports.files.abandon(newest, f"no quorum of voters for {self._leaderless_limit_s:.0f} s")

    def abandoned(self, verdict: str, exit_code: int) -> None:
        """Take note that the verdict of a job without a controller is durable; this agent or another wrote it."""
        if self.ranks.ending is None and not self._succession.in_contact:
            self.ranks.end(m.End(self.ranks.epoch, verdict, exit_code))

    @property
    def next_wakeup_s(self) -> float:
        """Return how many seconds the caller may sleep."""
        return 0.05 if not self._succession.in_contact else min(0.1, self.beat_interval_s)

    def _beat(self) -> None:
        self._ports.to_controller(
            heartbeat(self.ranks, self._ports, self._hello.incarnation, self._echo, self._echoed_at)
        )

    def offer(self, slots: int, evicted: int) -> None:
        """Tell the controller how many ranks this node has devices for, and which devices are evicted."""
        self.ranks.slots = slots
        self._hello = msgspec.structs.replace(self._hello, local_world_size=slots, evicted=evicted)
        if self._welcomed and self._succession.in_contact and self.ranks.ending is None:
            self._say_hello(self._ports.monotonic())

    def _say_hello(self, now: float) -> None:
        hello = msgspec.structs.replace(
            self._hello, epoch=self.ranks.epoch, committed=tuple(sorted(self.ranks.saves.committed)),
            last=self.ranks.state, prepared=self.ranks.highest_round, silent_s=self._succession.state.silent_s(now),
        )  # fmt: skip
        self._ports.to_controller(hello)

    # -- succession --------------------------------------------------------------------------------------------

    @property
    def following(self) -> EpochRecord | None:
        """Return the controller that is followed, whether or not it lives."""
        return self._succession.following

    @property
    def in_contact(self) -> bool:
        """Return whether the controller is believed to live."""
        return self._succession.in_contact

    @property
    def silent_s(self) -> float:
        """Return for how many seconds no controller was heard."""
        return self._succession.state.silent_s(self._ports.monotonic())

    @property
    def vote_record(self) -> VoteRecord:
        """Return the voters that this node knows, and what it promised."""
        return self._succession.state.vote_record

    def connection_lost(self) -> None:
        """Send Hello again: the transport lost the controller, and messages on their way may be lost."""
        self._succession.lose(self._ports.monotonic())
        self._welcomed = False
        self._next_beat = self._ports.monotonic()

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        """Take note that this node's controller has ended. It had no quorum since ``since`` (NEVER: never had one)."""
        now = self._ports.monotonic()
        self._led = (epoch, since if since != NEVER else now)
        self._succession.stepped_down(epoch, since, now, outvoted)
        self._welcomed = False

    def scanned(
        self, record: EpochRecord | None, pulse: int | None = None, verdict: tuple[str, int] | None = None
    ) -> None:
        """Take the newest epoch record (None without one), its controller's pulse, and this job's verdict, if any."""
        if verdict is not None:
            self.abandoned(*verdict)  # the verdict came while this agent had no controller
        if self.ranks.ending is None:
            self._succession.scanned(record, pulse, self._ports.monotonic())

    def claimed(self, epoch: int, won: bool) -> None:
        """Take note whether this agent was the first to claim ``epoch``."""
        if self.ranks.ending is None:
            self._succession.claimed(epoch, won, self._ports.monotonic())

    def witness_claimed(self, witness: str, holder: str) -> None:
        """Take note which node holds the witness that this node asked for."""
        if self.ranks.ending is None:
            self._succession.witness_claimed(witness, holder, self._ports.monotonic())

    def storage_failed(self) -> None:
        """Take note that the run directory did not answer."""
        self._succession.storage_failed(self._ports.monotonic())

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        """Take a message of an agent that called this one because of an election."""
        if self.ranks.ending is None:
            self._succession.peer_said(message, self._ports.monotonic())

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        """Take a message of an agent that follows this node, though no controller runs here."""
        record = self._succession.following
        if self._succession.in_contact and record is not None and record.node != self.node:
            self._ports.to_caller(message.node, m.Redirect(record.epoch, record.node, record.endpoint))
        else:
            epoch, since = self._led
            silent_s = max(0.0, self._ports.monotonic() - since) if epoch == message.epoch else 0.0
            self._ports.to_caller(message.node, m.NotLeading(message.epoch, silent_s))

    # -- LeadershipListener ------------------------------------------------------------------------------------

    def follow(self, record: EpochRecord, connected: bool) -> None:
        """Follow a controller."""
        self._welcomed = False
        self._echo = NEVER
        self.ranks.begin_epoch(record.epoch)
        self._next_beat = self._ports.monotonic()
        if not connected:
            self._ports.follow(record)

    def lead(self, term: Term) -> None:
        """Lead: this node was elected for ``term``."""
        self._ports.record("controller", epoch=term.epoch, node=self.node)
        self._ports.become_controller(term)

    def step_down(self, reason: str) -> None:
        """Take note that this node leads no more."""
        self._ports.step_down(reason)

    # -- the controller's words --------------------------------------------------------------------------------

    def controller_said(self, message: m.ToAgent) -> None:
        """Take a message of the controller that this agent follows; messages of others are refused."""
        if self.ranks.ending is not None:
            return
        now = self._ports.monotonic()
        if isinstance(message, m.Candidate | m.RequestVote | m.Redirect | m.NotLeading):
            self._succession.answered(message, now)
            return
        # of a controller that this node voted for
        if isinstance(message, m.Welcome) and message.epoch > self.ranks.epoch:
            self._succession.answered(message, now)
            return
        forced = isinstance(message, m.End) and message.epoch >= self.ranks.epoch
        if not forced and (message.epoch != self.ranks.epoch or not self._may_follow()):
            return
        self._succession.heard(message.epoch, now)
        match message:
            case m.Beat():
                self._renewed(message, now)
            case m.Welcome():
                self._welcome()
            case m.UpdateVoters():
                if self._succession.state.update_voters(message.membership):
                    self._ports.to_controller(m.VotersUpdated(self.node, self.ranks.epoch, message.membership.number))
            case m.Prepare():
                self.ranks.prepare(message)
            case m.Start():
                self.ranks.start(message)
            case m.End():
                self.ranks.end(message)
            case m.BeginProbe() | m.EndProbe():
                self._ports.services.probe(message)
            case m.StageReached():
                self.ranks.stage_reached(message)
            case (
                m.PersistStep() | m.CommitStep() | m.KeepCopies() | m.ProposeStop() | m.ConfirmStop()
                | m.TerminateRanks() | m.LookAtRanks() | m.PauseRanks() | m.ResumeRanks()
                | m.SaveAtStep() | m.RestartRank() | m.DrillStrike()
            ):  # fmt: skip
                self.ranks.during_round(message)
            case _:
                assert_never(message)

    def _renewed(self, message: m.Beat, now: float) -> None:
        self.ranks.lease = max(self.ranks.lease, message.sent + message.lease_s)
        self.ranks.times.answered(self._ports.monotonic() - message.sent)
        first = self._echo == NEVER
        if message.stamp > self._echo:
            self._echo, self._echoed_at = message.stamp, now
        if first:  # the sooner the controller knows of this agent, the sooner it may decide
            self._beat()
        self.ranks.start_when_leased()

    def _welcome(self) -> None:
        self._welcomed = True
        if self._echo == NEVER:
            self._beat()
        for signal in self.warnings.signals:
            self._warn(signal)
        self.ranks.reports.repeat()

    def warned(self, signal: str, within_s: float | None = None) -> None:
        """Take a signal that this agent got. It is kept, so that the next controller hears of it too.

        ``within_s``: seconds that a joiner's own job still has, where known.
        """
        self.warnings.take(signal, self._ports.monotonic(), within_s)
        if self._welcomed:
            self._warn(signal)

    def _warn(self, signal: str) -> None:
        now = self._ports.monotonic()
        self._ports.to_controller(self.warnings.message(self.node, self.ranks.epoch, signal, now))
