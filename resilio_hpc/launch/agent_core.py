"""The agent's decisions: whom to follow, what its ranks do in which round, when its lease ends. Pure.

Everything that touches the world goes through ``Ports``, which the real agent implements with sockets and processes
and a simulator with virtual ones.
"""

from __future__ import annotations

from typing import Any, Protocol

from resilio_hpc.core import rank_link
from resilio_hpc.launch import messages as m
from resilio_hpc.launch.local_round import LocalRound
from resilio_hpc.launch.succession import Claim, EpochRecord, Follow, Scan, Succession


class Ports(Protocol):
    """What an agent can do to the world. None of it blocks; answers come back as events."""

    def monotonic(self) -> float: ...  # noqa: D102, E704
    def to_controller(self, message: m.ToController) -> None: ...  # noqa: D102, E704
    def follow(self, record: EpochRecord) -> None: ...  # noqa: D102, E704
    def become_controller(self, epoch: int) -> None: ...  # noqa: D102, E704
    def scan_epochs(self) -> None: ...  # noqa: D102, E704
    def claim_epoch(self, epoch: int) -> None: ...  # noqa: D102, E704
    def stop_ranks(self, signal_first: bool, grace_s: float, keep_stores_from: int) -> None: ...  # noqa: D102, E704
    def terminate_ranks(self) -> None: ...  # noqa: D102, E704
    def open_store(self, round_number: int) -> None: ...  # noqa: D102, E704
    def spawn(self, local: LocalRound, start: m.Start) -> None: ...  # noqa: D102, E704
    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None: ...  # noqa: D102, E704
    def persist(self, message: m.Persist, member: m.Member, world_size: int) -> None: ...  # noqa: D102, E704
    def commit(self, message: m.Commit) -> None: ...  # noqa: D102, E704
    def held(self) -> tuple[m.Held, ...]: ...  # noqa: D102, E704
    def forget_snapshots_after(self, step: int) -> None: ...  # noqa: D102, E704
    def record(self, kind: str, **fields: Any) -> None: ...  # noqa: D102, E704
    def keep(self, state: m.RoundState) -> None: ...  # noqa: D102, E704
    def leave(self, verdict: str, exit_code: int) -> None: ...  # noqa: D102, E704


class AgentCore:
    """One node's agent. ``hello`` is completed with what changes each time that it is sent."""

    def __init__(self, hello: m.Hello, succession: Succession, ports: Ports, heartbeat_timeout_s: float) -> None:
        self.node = hello.node
        self.slots = hello.local_world_size
        self.epoch = 0
        self.state: m.RoundState | None = hello.last
        self.local: LocalRound | None = None
        self.committed: set[int] = set(hello.committed)
        self.ending: m.End | None = None
        self.warnings: list[str] = []
        self._hello = hello
        self._succession = succession
        self._ports = ports
        self._timeout = heartbeat_timeout_s
        self._beat_interval = min(1.0, heartbeat_timeout_s / 8)
        self._next_beat = 0.0
        self._lease = ports.monotonic() + heartbeat_timeout_s
        self._welcomed = False
        self._prepared = -1
        self._stopping = False
        self._stopped_for = -1
        self._waiting_start: m.Start | None = None
        self._ranks_alive = False

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Heartbeats, lease, succession."""
        now = self._ports.monotonic()
        scan = self._succession.tick(now)
        if isinstance(scan, Scan):
            self._ports.scan_epochs()
        if now >= self._next_beat and self._succession.following is not None and self.ending is None:
            self._next_beat = now + self._beat_interval
            if self._welcomed:
                self._beat(now)
            else:
                self._say_hello()
        if self._ranks_alive and now > self._lease and self.ending is None:
            self._ports.record("lease_ended", round=self.state.round if self.state else -1)
            self._stop_ranks()

    @property
    def next_wakeup_s(self) -> float:
        """How long the caller may sleep."""
        return 0.05 if not self._succession.in_contact else min(0.1, self._beat_interval)

    def _beat(self, now: float) -> None:
        number = self.local.number if self.local else -1
        step = self.local.step if self.local else -1
        step_time = self.local.step_time if self.local else 0.0
        self._ports.to_controller(
            m.Heartbeat(self.node, self._hello.incarnation, self.epoch, now, number, step, step_time)
        )

    def _say_hello(self) -> None:
        running = self.local.number if self.local and self._ranks_alive else -1
        hello = {field: getattr(self._hello, field) for field in self._hello.__struct_fields__}
        hello |= {
            "running": running, "committed": tuple(sorted(self.committed)), "held": self._ports.held(),
            "last": self.state,
        }  # fmt: skip
        self._ports.to_controller(m.Hello(**hello))

    # -- succession --------------------------------------------------------------------------------------------

    def connection_lost(self) -> None:
        """The transport lost the controller."""
        self._succession.connection_lost(self._ports.monotonic())

    def scanned(self, record: EpochRecord | None) -> None:
        """Newest epoch record, or None when there is none."""
        self._follow_or_claim(self._succession.scanned(record, self._ports.monotonic()))

    def claimed(self, epoch: int, won: bool, record: EpochRecord | None) -> None:
        """Whether our claim of ``epoch`` was the first."""
        follow = self._succession.claimed(epoch, won, record, self._ports.monotonic())
        if follow is not None:
            self._ports.record("controller", epoch=epoch, node=self.node)
            self._ports.become_controller(epoch)
        self._follow_or_claim(follow)

    def storage_failed(self) -> None:
        """The run directory did not answer."""
        self._succession.storage_failed(self._ports.monotonic())

    def _follow_or_claim(self, step: Claim | Follow | None) -> None:
        if isinstance(step, Claim):
            self._ports.claim_epoch(step.epoch)
        elif isinstance(step, Follow):
            self._welcomed = False
            self.epoch = step.record.epoch
            self._next_beat = self._ports.monotonic()
            self._lease = max(self._lease, self._ports.monotonic() + self._timeout)
            self._ports.follow(step.record)

    # -- the controller's words --------------------------------------------------------------------------------

    def controller_said(self, message: m.ToAgent) -> None:
        """Take a message; older epochs are refused."""
        if message.epoch < self.epoch or self.ending is not None:
            return
        now = self._ports.monotonic()
        peers = [node for node, _ in getattr(message, "peers", ())]
        self._succession.heard(message.epoch, peers, now)
        if isinstance(message, m.Beat):
            self._lease = max(self._lease, message.sent + self._timeout)
        elif isinstance(message, m.Welcome):
            self._welcomed = True
            for signal in self.warnings:
                self._ports.to_controller(m.Warned(self.node, self.epoch, signal))
        elif isinstance(message, m.Prepare):
            self._prepare(message)
        elif isinstance(message, m.Start):
            self._start(message)
        elif isinstance(message, m.End):
            self._end(message)
        else:
            self._during_round(message)

    def _prepare(self, message: m.Prepare) -> None:
        if message.round <= self._prepared and message.round != self._prepared:
            return
        self._prepared = message.round
        self._waiting_start = None
        if message.open_store:
            self._ports.open_store(message.round)
        if self._ranks_alive or self._stopping:
            self._stop_ranks()
        else:
            self._say_stopped()

    def _stop_ranks(self, grace_s: float = 0.0) -> None:
        self.local = None
        if not self._stopping:
            self._stopping = True
            self._ports.stop_ranks(grace_s > 0, grace_s, self._prepared)

    def _say_stopped(self) -> None:
        if self._prepared >= 0:
            self._ports.to_controller(m.RanksStopped(self.node, self.epoch, self._prepared, self._ports.held()))

    def _start(self, message: m.Start) -> None:
        self.state = message.state
        self._ports.keep(message.state)
        self.committed |= set(message.state.committed)
        member = next((x for x in message.state.members if x.node == self.node), None)
        if member is None or message.state.round < self._prepared or self._stopping:
            return
        # Snapshots beyond the restore point belong to a life whose steps will be computed anew: never mix the two.
        self._ports.forget_snapshots_after(message.restore.step if message.restore else -1)
        self.local = LocalRound(self.node, message.state, member, message.restore)
        self._ranks_alive = True
        self._lease = max(self._lease, self._ports.monotonic() + self._timeout)
        self._ports.spawn(self.local, message)

    def _during_round(self, message: m.ToAgent) -> None:
        local = self.local
        if isinstance(message, m.StageReached):
            if message.stage == "committed":
                self.committed.add(message.step)
            for rank in local.attached if local else ():
                self._ports.tell_rank(rank, rank_link.Stage(message.step, message.stage, message.error))
        elif local is None or getattr(message, "round", -1) != local.number:
            return
        elif isinstance(message, m.Persist):
            world = sum(x.local_world_size for x in self.state.members) if self.state else 0
            self._ports.persist(message, local.member, world)
        elif isinstance(message, m.Commit):
            self._ports.commit(message)
        elif isinstance(message, m.ProposeStop):
            for rank in local.attached:
                self._ports.tell_rank(rank, rank_link.StopAt(message.target))
            self._send_all(local.propose_stop(message.target))
        elif isinstance(message, m.ConfirmStop):
            for rank in local.attached:
                self._ports.tell_rank(rank, rank_link.StopConfirmed(message.target))
        elif isinstance(message, m.TerminateRanks):
            local.terminating = True
            self._ports.terminate_ranks()

    def _end(self, message: m.End) -> None:
        self.ending = message
        self.local = None
        if self._ranks_alive or self._stopping:
            self._stopping = True
            self._ports.stop_ranks(True, 1.0, 1 << 30)
        else:
            self._ports.leave(message.verdict, message.exit_code)

    # -- the node's own events ---------------------------------------------------------------------------------

    def all_stopped(self) -> None:
        """Every rank and descendant is gone."""
        self._stopping = False
        self._ranks_alive = False
        self.local = None
        if self.ending is not None:
            self._ports.leave(self.ending.verdict, self.ending.exit_code)
        else:
            self._say_stopped()

    def store_ready(self, round_number: int, port: int) -> None:
        """The store of a round is open."""
        self._ports.to_controller(m.StoreReady(self.node, self.epoch, round_number, port))

    def ranks_started(self, round_number: int, seconds: float, mode: str) -> None:
        """All local ranks run."""
        self._ports.to_controller(m.RanksStarted(self.node, self.epoch, round_number, seconds, mode))

    def store_died(self, round_number: int, error: str, at: float) -> None:
        """The rendezvous store of a round is gone: its ranks cannot meet, so the round is tried again."""
        if round_number == self._prepared:
            rank = self.local.member.first_rank if self.local else 0
            failure = m.RankFailure(self.node, rank, 0, "store_lost", at, None, None, f"rendezvous store: {error}")
            self._ports.to_controller(m.RankFailed(self.node, self.epoch, round_number, failure))

    def give_up(self, reason: str) -> None:
        """This node cannot run ranks: leave the run to the others."""
        self._ports.to_controller(m.Goodbye(self.node, self.epoch, reason))
        self.ending = m.End(self.epoch, "agent_failed", 1)

    def rank_said(self, round_number: int, local_rank: int, message: rank_link.RankMessage) -> None:
        """A rank of a round said something; other rounds' ranks are not heard."""
        if self.local is not None and self.local.number == round_number and local_rank in self.local.ranks:
            self._send_all(self.local.said(local_rank, message, self._ports.monotonic()))

    def rank_exited(
        self, local_rank: int, exit_code: int | None, signal: int | None, at: float, error: tuple[str, str]
    ) -> None:
        """A rank ended by itself (not because we stopped it)."""
        if self.local is None or self._stopping or local_rank not in self.local.ranks:
            return
        self._send_all(self.local.exited(local_rank, exit_code, signal, at, error))

    def spawn_failed(self, local_rank: int, error: str, at: float) -> None:
        """A rank could not be started."""
        if self.local is not None and not self._stopping:
            rank = self.local.ranks[local_rank].rank
            failure = m.RankFailure(self.node, rank, local_rank, "spawn", at, None, None, error)
            self._ports.to_controller(m.RankFailed(self.node, self.epoch, self.local.number, failure))

    def spawner_died(self, at: float) -> None:
        """The spawner is gone and its ranks with it; a new one is being started."""
        local, was_alive = self.local, self._ranks_alive
        self._stopping = self._ranks_alive = False
        self.local = None
        if self.ending is not None:
            self._ports.leave(self.ending.verdict, self.ending.exit_code)
        elif local is not None and was_alive:
            rank = local.member.first_rank
            failure = m.RankFailure(
                self.node, rank, 0, "spawner_lost", at, None, None, "the process that forks ranks was killed"
            )
            self._ports.to_controller(m.RankFailed(self.node, self.epoch, local.number, failure))
        else:
            self._say_stopped()

    def persisted(self, round_number: int, step: int, record: dict[str, Any]) -> None:
        """The saver wrote this node's file."""
        self._ports.to_controller(m.Persisted(self.node, self.epoch, round_number, step, record))

    def persist_failed(self, round_number: int, step: int, error: str) -> None:
        """The saver could not write."""
        self._ports.to_controller(m.PersistFailed(self.node, self.epoch, round_number, step, error))

    def commit_done(self, step: int, seconds: float) -> None:
        """The saver wrote the manifest."""
        self.committed.add(step)
        self._ports.to_controller(m.Committed(self.node, self.epoch, step, seconds))

    def warned(self, signal: str) -> None:
        """A signal reached this agent. Kept, so that the next controller hears of it too."""
        self.warnings.append(signal)
        if self._welcomed:
            self._ports.to_controller(m.Warned(self.node, self.epoch, signal))

    def _send_all(self, messages: list[m.ToController]) -> None:
        for message in messages:
            self._ports.to_controller(message)
