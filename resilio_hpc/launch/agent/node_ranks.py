"""What an agent makes of its ranks: which round they run, when they stop, what is told of them. Pure.

Everything that touches the world goes through ``Ports``. Orders may come twice (the controller repeats them when a
connection broke), and so may answers: both sides take the second for what it is.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.launch.agent.agent_ports import AT_ONCE, NO_GRACE, Ports
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow

LAST_GRACE_S = 1.0  # at the end of a run, from SIGTERM to SIGKILL
FACTS: dict[type, str] = {  # what the controller must not miss of a round; the newest of each name is repeated
    m.RanksStarted: "started", m.FirstStep: "first step", m.RanksDone: "done", m.RankFailed: "failed",
    m.SnapshotWhole: "snapshot", m.StepPersisted: "file", m.PersistFailed: "file", m.ManifestWritten: "manifest",
}  # fmt: skip

OfRound = m.PersistStep | m.CommitStep | m.ProposeStop | m.ConfirmStop | m.TerminateRanks
"""Orders that hold for the ranks of one round."""


class NodeRanks:
    """One node's ranks over all rounds: what runs, what the controller ordered, what it is told.

    ``slots``: for how many ranks the node's devices do. ``ready``: ranks would start at once. ``alive``: some may run.
    ``lease``: until then they may, in monotonic seconds. ``facts`` are told again to a controller that comes anew.
    """

    def __init__(
        self, node: str, slots: int, last: m.RoundState | None, ports: Ports, graces: Graces = NO_GRACE
    ) -> None:
        self.node = node
        self.slots = slots
        self.ready = True
        self.epoch = 0
        self.state: m.RoundState | None = last
        self.local: LocalRound | None = None
        self.committed: set[int] = set()
        self.ending: m.End | None = None
        self._ports = ports
        self.lease = ports.monotonic()
        self._waiting_start: m.Start | None = None  # for a lease
        self._prepared = -1  # the round of the last Prepare of this epoch
        self.highest_round = last.round if last else -1
        self._started_round = -1  # the last round whose ranks were started in this epoch
        self._store: tuple[int, int] = (-1, 0)  # round and port of the store that was asked for here; port 0: not yet
        self._graces = graces
        self._stopping = False
        self._stopped_at = 0.0  # Unix seconds
        self._in_grace = False  # ranks are being stopped, and some may still run
        self.alive = False
        self._before: LocalRound | None = None  # the local ranks of the last round, once they are being stopped
        self.facts: dict[tuple[str, int], m.ToController] = {}
        self._ordered: tuple[int, int, int, bool] = (-1, -1, -1, False)  # of the saver: epoch, round, step, to commit?

    # -- the controller's orders -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Drop the orders of a former controller; the same one, called again, still counts on them."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._prepared = self._started_round = -1
        self._waiting_start = None
        self.facts.clear()

    def prepare(self, message: m.Prepare) -> None:
        """Stop ranks of earlier rounds, open the store if asked."""
        if message.round < self._prepared:
            return
        if message.round > self._prepared:
            self.facts.clear()
            self._waiting_start = None
        self._prepared = message.round
        self.highest_round = max(self.highest_round, message.round)
        if message.open_store:
            self._open_store(message.round)
        if self._started_round == message.round:
            return  # repeated, and late: this round is running
        if self.alive or self._stopping:
            self._stop_ranks(StopHow(self._graces.failure))
        else:
            self._say_stopped()

    def _open_store(self, round_number: int) -> None:
        number, port = self._store
        if number != round_number:
            self._store = (round_number, 0)
            self._ports.open_store(round_number)
        elif port:
            self._ports.to_controller(m.StoreOpened(self.node, self.epoch, round_number, port))

    def _stop_ranks(self, how: StopHow = AT_ONCE) -> None:
        self._before, self.local = self.local or self._before, None
        if not self._stopping or (self._in_grace and how == AT_ONCE):
            if not self._stopping:
                self._stopped_at = self._ports.unix()
            self._stopping = True
            self._in_grace = how.grace_s > 0
            self._ports.stop_ranks(how, self._prepared)

    def _stop_ranks_left_over(self) -> None:
        """Others go on without us: what still runs here, or waits to be started, is of a life that is over."""
        if self.alive:
            self._stop_ranks()
        self.local = None

    def _say_stopped(self) -> None:
        if self._prepared < 0 or self._started_round == self._prepared:
            return
        known = self.state.life if self.state else m.NO_LIFE
        completed = self._before.furthest if self._before and self._before.life == known else -1
        self._ports.to_controller(
            m.RanksStopped(self.node, self.epoch, self._prepared, self._ports.held(), known, completed)
        )

    def start(self, message: m.Start) -> None:
        """Start this node's ranks of a round, or wait as a spare."""
        number = message.state.round
        if number < self._prepared or number <= self._started_round:
            return
        life = message.state.life
        was_there = self.state is not None and self.state.life in (message.follows, life)
        member = message.state.member(self.node)
        # Snapshots beyond the restore point belong to a life whose steps will be computed anew: never mix the two. So
        # do older ones of a node that missed a start, and a node that waits takes no part in the new life at all. First
        # this, then ``keep``: who is killed in between must not seem to have been there.
        step = message.restore.step if message.restore is not None and member is not None and was_there else -1
        self._ports.forget_snapshots_after(step, life)
        self.state = message.state
        self._ports.keep(message.state)
        self.committed |= set(message.state.committed)
        self.highest_round = max(self.highest_round, number)
        self._started_round = number
        self._before = None
        self._waiting_start = None
        if member is None:
            self._stop_ranks_left_over()
            return
        self.local = LocalRound(self.node, message.state, member, message.restore)
        if self._stopping or self._prepared != number:
            self._tell(self._failure("spawn", "this node was not prepared for the round", self._ports.unix()))
            return
        self._waiting_start = message
        self.start_when_leased()

    def start_when_leased(self) -> None:
        """Start the ranks that wait for a lease; the first Beat of a controller may come after its Start."""
        start = self._waiting_start
        if start is None or self.local is None or self._stopping or self._ports.monotonic() > self.lease:
            return
        self._waiting_start = None
        self.alive = True
        self._ports.spawn(self.local, start)

    def stage_reached(self, message: m.StageReached) -> None:
        """Tell the ranks that a checkpoint is durable, or failed."""
        if message.stage is Stage.COMMITTED:
            self.committed.add(message.step)
        for rank in self.local.attached if self.local else ():
            self._ports.tell_rank(rank, rank_link.SaveProgress(message.step, message.stage, message.error))

    def during_round(self, message: OfRound) -> None:
        """Carry out an order for the ranks of the present round."""
        local = self.local
        if local is None or message.round != local.number:
            return
        match message:
            case m.PersistStep() | m.CommitStep():
                self._write(message, local)
            case m.ProposeStop():
                for rank in local.attached:
                    self._ports.tell_rank(rank, rank_link.StopAt(message.target))
                self._send_all(local.propose_stop(message.target))
            case m.ConfirmStop():
                local.stop_confirmed = local.target == message.target
                for rank in local.attached:
                    self._ports.tell_rank(rank, rank_link.StopConfirmed(message.target))
            case m.TerminateRanks():
                if not local.terminating:
                    local.terminating = True
                    self._ports.terminate_ranks()
            case _:
                assert_never(message)

    def _write(self, message: m.PersistStep | m.CommitStep, local: LocalRound) -> None:
        order = (message.epoch, message.round, message.step, isinstance(message, m.CommitStep))
        if order[:3] == self._ordered[:3] and order <= self._ordered:
            return  # repeated: its answer is on the way, or among the facts that are said again
        if isinstance(message, m.CommitStep) and self._ports.monotonic() > self.lease:
            # it lay here while we stood still: others may have gone on from an older step by now
            self.persist_failed(message.round, message.step, "the order to commit came after the end of the lease")
            return
        self._ordered = order
        if isinstance(message, m.CommitStep):
            self._ports.commit(message)
        else:
            world = sum(member.local_world_size for member in self.state.members) if self.state else 0
            self._ports.persist(message, local.member, world)

    def end(self, message: m.End) -> None:
        """End the ranks, then this agent."""
        self.ending = message
        self.local = None
        if self.alive or self._stopping:
            self._stopping = True
            well = message.verdict == "completed"
            how = StopHow(self._graces.left_running if well else LAST_GRACE_S, for_good=True, well=well)
            self._ports.stop_ranks(how, 1 << 30)
        else:
            self._leave()

    def _leave(self) -> None:
        assert self.ending is not None
        self._ports.to_controller(m.Goodbye(self.node, self.epoch, self.ending.verdict))
        self._ports.leave(self.ending.verdict, self.ending.exit_code)

    def end_lease(self) -> None:
        """Stop: without a lease the controller may start another node's ranks in this one's place."""
        if self._stopping and not self._in_grace:
            return
        local = self.local
        self._ports.record("lease_ended", round=local.number if local else -1)
        if local is not None:
            self._tell(self._failure("lease_ended", "no word from the controller", self._ports.unix()))
        self._stop_ranks()

    # -- the node's own events ---------------------------------------------------------------------------------

    def all_stopped(self) -> None:
        """Every rank and descendant is gone."""
        self._stopping = self._in_grace = False
        self.alive = False
        self._before, self.local = self.local or self._before, None
        if self.ending is not None:
            self._leave()
        else:
            self._say_stopped()

    def store_ready(self, round_number: int, port: int) -> None:
        """Learn that the store of a round is open."""
        if round_number == self._store[0]:
            self._store = (round_number, port)
            self._ports.to_controller(m.StoreOpened(self.node, self.epoch, round_number, port))

    def ranks_started(self, round_number: int, seconds: float, mode: str) -> None:
        """All local ranks run."""
        self._tell(m.RanksStarted(self.node, self.epoch, round_number, seconds, mode))

    def copies_failed(self, round_number: int, restore: m.RestorePoint, error: str) -> None:
        """Learn that the snapshots that ranks of this node are to restore could not be brought here."""
        if self.local is not None and self.local.number == round_number and not self._stopping:
            failed = self._failure("restore_failed", f"{restore.source} {restore.step}: {error}", self._ports.unix())
            bad = msgspec.structs.replace(failed.failure, bad_copy=restore)
            self._tell(msgspec.structs.replace(failed, failure=bad))

    def store_died(self, round_number: int, error: str, at: float) -> None:
        """Have a round tried again whose rendezvous store is gone: its ranks cannot meet."""
        if round_number == self._prepared:
            self._store = (-1, 0)
            self._tell(self._failure("store_lost", f"rendezvous store: {error}", at))

    def give_up(self, reason: str) -> None:
        """Learn that this node cannot run ranks: leave the run to the others."""
        self._ports.to_controller(m.Goodbye(self.node, self.epoch, reason))
        self.ending = m.End(self.epoch, "agent_failed", 1)

    def rank_said(self, round_number: int, local_rank: int, message: rank_link.RankMessage) -> None:
        """Hear a rank of a round; other rounds' ranks are not heard."""
        local = self.local
        if local is None or local.number != round_number or local_rank not in local.ranks:
            return
        answers = local.said(local_rank, message, self._ports.monotonic())
        self._send_all(answers)
        if self.state is not None and any(isinstance(answer, m.FirstStep) for answer in answers):
            self.state = msgspec.structs.replace(self.state, steps_reported=True)  # the next controller must know
            self._ports.keep(self.state)
        if isinstance(message, rank_link.SnapshotTaken) and self._is_committed(message.step, local):
            self._ports.tell_rank(local_rank, rank_link.SaveProgress(message.step, Stage.COMMITTED))
        if isinstance(message, rank_link.Attach):
            for word in local.pending_stop():
                self._ports.tell_rank(local_rank, word)

    def _is_committed(self, step: int, local: LocalRound) -> bool:
        """Whether a rank saves again what its round began with: a restart after the last step does.

        No rank commits it a second time, and later steps may be of a life that is over.
        """
        return local.restore is not None and step <= local.restore.step and step in self.committed

    def rank_exited(
        self, local_rank: int, exit_code: int | None, signal: int | None, at: float, error: tuple[str, str]
    ) -> None:
        """Learn that a rank ended; ``at``: Unix seconds, of its exception where it recorded one.

        One that ends because we stop it is of no interest, unless it had failed before: its peers' echoes may have been
        heard first."""
        if self._stopping:
            before = self._before
            if before is not None and local_rank in before.ranks and error[1] and at <= self._stopped_at:
                self._send_all(before.exited(local_rank, exit_code or 1, None, at, error))
        elif self.local is not None and local_rank in self.local.ranks:
            self._send_all(self.local.exited(local_rank, exit_code, signal, at, error))

    def spawn_failed(self, local_rank: int, error: str, at: float) -> None:
        """Learn that a rank could not be started."""
        if self.local is not None and not self._stopping:
            self._tell(self._failure("spawn", error, at, local_rank))

    def spawner_died(self, at: float) -> None:
        """Learn that the spawner is gone, and its ranks and stores with it; a new one is being started."""
        was_needed = (self.local is not None and self.alive) or self._store[0] == self._prepared >= 0
        if was_needed and self.ending is None:
            self._tell(self._failure("spawner_lost", "the process that forks ranks was killed", at))
        self._store = (-1, 0)
        self.all_stopped()

    def persisted(self, round_number: int, step: int, record: ShardRecord) -> None:
        """Learn that the saver wrote this node's file."""
        self._tell(m.StepPersisted(self.node, self.epoch, round_number, step, record))

    def persist_failed(self, round_number: int, step: int, error: str) -> None:
        """Learn that the saver could not write."""
        self._tell(m.PersistFailed(self.node, self.epoch, round_number, step, error))

    def commit_done(self, round_number: int, step: int, seconds: float) -> None:
        """Learn that the saver wrote the manifest."""
        self.committed.add(step)
        self._tell(m.ManifestWritten(self.node, self.epoch, round_number, step, seconds))

    # -- saying it ---------------------------------------------------------------------------------------------

    def _failure(self, kind: str, text: str, at: float, local_rank: int = 0) -> m.RankFailed:
        """Return a failure that is not a rank's own, of the round that runs here or is being prepared."""
        local = self.local
        number = local.number if local else self._prepared
        rank = local.ranks[local_rank].rank if local and local_rank in local.ranks else 0
        failure = m.RankFailure(self.node, rank, local_rank, kind, at, None, None, text)
        return m.RankFailed(self.node, self.epoch, number, failure)

    def _tell(self, message: m.ToController) -> None:
        """Tell the controller, and again if the connection breaks."""
        name = FACTS.get(type(message))
        if name is not None:
            self.facts[name, message.failure.local_rank if isinstance(message, m.RankFailed) else 0] = message
        self._ports.to_controller(message)

    def _send_all(self, messages: list[m.ToController]) -> None:
        for message in messages:
            self._tell(message)
