"""The agent's decisions about its ranks: which round they run, when they stop, what the controller hears. Pure.

All effects go through ``Ports``. Orders may come twice, since the controller repeats them after a broken connection. So
may answers. Each side ignores the second copy.
"""

from __future__ import annotations

import msgspec
from typing_extensions import assert_never

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.launch.agent.agent_ports import AT_ONCE, NO_GRACE, Ports
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import reads_like_echo
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow

LAST_GRACE_S = 1.0  # seconds from SIGTERM to SIGKILL at the end of a run
FACTS: dict[type, str] = {  # what the controller must not miss of a round: the newest message of each name is repeated
    m.RanksStarted: "started", m.FirstStep: "first step", m.RanksDone: "done", m.RankFailed: "failed",
    m.SnapshotWhole: "snapshot", m.StepPersisted: "file", m.PersistFailed: "file", m.ManifestWritten: "manifest",
}  # fmt: skip

OfRound = m.PersistStep | m.CommitStep | m.ProposeStop | m.ConfirmStop | m.TerminateRanks
"""Orders that hold for the ranks of one round."""


class NodeRanks:
    """One node's ranks over all rounds: what runs, what the controller ordered, what the controller hears.

    ``slots``: ranks that the node's devices allow. ``ready``: ranks would start at once. ``alive``: some may run.
    ``lease``: until when they may, in monotonic seconds. ``facts`` are sent again to each new controller.
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
        self._waiting_start: m.Start | None = None  # waits for a lease
        self._prepared = -1  # the round of the last Prepare of this epoch
        self.highest_round = last.round if last else -1
        self._started_round = -1  # the last round whose ranks were started in this epoch
        # round and port of the store that was asked for here; port 0: not open yet
        self._store: tuple[int, int] = (-1, 0)
        self._graces = graces
        self._stopping = False
        self._stopped_at = 0.0  # Unix seconds
        self._in_grace = False  # ranks are being stopped, and some may still run
        self.alive = False
        self.echoes = 0  # ranks of the last round whose error reads like an echo of another one's end
        self._before: LocalRound | None = None  # the local ranks of the last round, once they are being stopped
        self.facts: dict[tuple[str, int], m.ToController] = {}
        # the saver's last order: epoch, round, step, whether to commit
        self._ordered: tuple[int, int, int, bool] = (-1, -1, -1, False)

    # -- the controller's orders -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Drop the orders of a former controller. For the same controller again, keep them."""
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
        if message.cause is not None:
            self._ports.judge(message.cause)
        self.highest_round = max(self.highest_round, message.round)
        if message.open_store:
            self._open_store(message.round)
        if self._started_round == message.round:
            return  # a repeated, late order: this round runs already
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
        """Stop ranks that still run, or wait to be started.

        The other nodes went on without them, so their life is over.
        """
        if self.alive:
            self._stop_ranks()
        self.local = None

    def _say_stopped(self) -> None:
        if self._prepared < 0 or self._started_round == self._prepared:
            return
        known = self.state.life if self.state else m.NO_LIFE
        completed = self._before.furthest if self._before and self._before.life == known else -1
        self._ports.to_controller(
            m.RanksStopped(self.node, self.epoch, self._prepared, self._ports.held(), known, completed, self.echoes)
        )

    def start(self, message: m.Start) -> None:
        """Start this node's ranks of a round, or wait as a spare."""
        number = message.state.round
        if number < self._prepared or number <= self._started_round:
            return
        life = message.state.life
        was_there = self.state is not None and self.state.life in (message.follows, life)
        member = message.state.member(self.node)
        # Snapshots beyond the restore point belong to another life, whose steps are computed again: the two must not
        # mix. The same holds for older snapshots of a node that missed a start, and of a node that waits as a spare.
        # Drop first, then ``keep``: an agent that is killed in between must not seem to have taken part.
        step = message.restore.step if message.restore is not None and member is not None and was_there else -1
        self._ports.forget_snapshots_after(step, life)
        self._ports.judge(message.cause)
        self.echoes = 0
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
        """Start the ranks that wait for a lease: a controller's first Beat may come after its Start."""
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
        """Carry out an order for the ranks of the current round."""
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
            return  # a repeated order: its answer is on the way, or among the facts that are sent again
        if isinstance(message, m.CommitStep) and self._ports.monotonic() > self.lease:
            # the order waited here while this node stood still, and the others may have gone on from an older step
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
        self._ports.judge(message.cause)
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
        """Stop the ranks: without a lease, the controller may start other ranks in their place."""
        if self._stopping and not self._in_grace:
            return
        local = self.local
        self._ports.record("lease_ended", round=local.number if local else -1)
        if local is not None:
            self._tell(self._failure("lease_ended", "no word from the controller", self._ports.unix()))
        self._stop_ranks()

    # -- the node's own events ---------------------------------------------------------------------------------

    def all_stopped(self) -> None:
        """Take note that every rank and all its descendants are gone."""
        self._stopping = self._in_grace = False
        self.alive = False
        self._before, self.local = self.local or self._before, None
        if self.ending is not None:
            self._leave()
        else:
            self._say_stopped()

    def store_ready(self, round_number: int, port: int) -> None:
        """Take note that the store of a round is open."""
        if round_number == self._store[0]:
            self._store = (round_number, port)
            self._ports.to_controller(m.StoreOpened(self.node, self.epoch, round_number, port))

    def ranks_started(self, round_number: int, seconds: float, mode: str) -> None:
        """Take note that all local ranks run."""
        self._tell(m.RanksStarted(self.node, self.epoch, round_number, seconds, mode))

    def copies_failed(self, round_number: int, restore: m.RestorePoint, error: str) -> None:
        """Take note that snapshots for ranks of this node could not be fetched."""
        if self.local is not None and self.local.number == round_number and not self._stopping:
            failed = self._failure("restore_failed", f"{restore.source} {restore.step}: {error}", self._ports.unix())
            bad = msgspec.structs.replace(failed.failure, bad_copy=restore)
            self._tell(msgspec.structs.replace(failed, failure=bad))

    def store_died(self, round_number: int, error: str, at: float) -> None:
        """Ask for another round: the rendezvous store is gone, so its ranks cannot meet."""
        if round_number == self._prepared:
            self._store = (-1, 0)
            self._tell(self._failure("store_lost", f"rendezvous store: {error}", at))

    def give_up(self, reason: str) -> None:
        """Leave the run to the other nodes: this node cannot run ranks."""
        self._ports.to_controller(m.Goodbye(self.node, self.epoch, reason))
        self.ending = m.End(self.epoch, "agent_failed", 1)

    def rank_said(self, round_number: int, local_rank: int, message: rank_link.RankMessage) -> None:
        """Take a message of a rank; those of other rounds are ignored."""
        local = self.local
        if local is None or local.number != round_number or local_rank not in local.ranks:
            return
        answers = local.said(local_rank, message, self._ports.monotonic())
        self._send_all(answers)
        if self.state is not None and any(isinstance(answer, m.FirstStep) for answer in answers):
            self.state = msgspec.structs.replace(self.state, steps_reported=True)  # the next controller needs to know
            self._ports.keep(self.state)
        if isinstance(message, rank_link.SnapshotTaken) and self._is_committed(message.step, local):
            self._ports.tell_rank(local_rank, rank_link.SaveProgress(message.step, Stage.COMMITTED))
        if isinstance(message, rank_link.Attach):
            for word in local.pending_stop():
                self._ports.tell_rank(local_rank, word)

    def _is_committed(self, step: int, local: LocalRound) -> bool:
        """Return whether a rank saves the step again that its round began with, as a restart after the last step does.

        Such a step is not committed a second time, and later steps may be of a life that is over.
        """
        return local.restore is not None and step <= local.restore.step and step in self.committed

    def rank_exited(
        self, local_rank: int, exit_code: int | None, signal: int | None, at: float, error: tuple[str, str]
    ) -> None:
        """Take note that a rank ended; ``at``: Unix seconds, of its exception where it recorded one.

        A rank that ends because it is stopped is ignored, unless it had failed before. Its peers' errors, which follow
        from its own, may have come first.
        """
        if exit_code != 0 and reads_like_echo(error[0]):
            self.echoes += 1
        if self._stopping:
            before = self._before
            if before is not None and local_rank in before.ranks and error[1] and at <= self._stopped_at:
                self._send_all(before.exited(local_rank, exit_code or 1, None, at, error))
        elif self.local is not None and local_rank in self.local.ranks:
            self._send_all(self.local.exited(local_rank, exit_code, signal, at, error))

    def spawn_failed(self, local_rank: int, error: str, at: float) -> None:
        """Take note that a rank could not be started."""
        if self.local is not None and not self._stopping:
            self._tell(self._failure("spawn", error, at, local_rank))

    def spawner_died(self, at: float) -> None:
        """Take note that the spawner is gone, and its ranks and stores with it. A new one is being started."""
        was_needed = (self.local is not None and self.alive) or self._store[0] == self._prepared >= 0
        if was_needed and self.ending is None:
            self._tell(self._failure("spawner_lost", "the process that forks ranks was killed", at))
        self._store = (-1, 0)
        self.all_stopped()

    def persisted(self, round_number: int, step: int, record: ShardRecord) -> None:
        """Take note that the saver wrote this node's file."""
        self._tell(m.StepPersisted(self.node, self.epoch, round_number, step, record))

    def persist_failed(self, round_number: int, step: int, error: str) -> None:
        """Take note that the saver could not write."""
        self._tell(m.PersistFailed(self.node, self.epoch, round_number, step, error))

    def commit_done(self, round_number: int, step: int, seconds: float) -> None:
        """Take note that the saver wrote the manifest."""
        self.committed.add(step)
        self._tell(m.ManifestWritten(self.node, self.epoch, round_number, step, seconds))

    # -- saying it ---------------------------------------------------------------------------------------------

    def _failure(self, kind: str, text: str, at: float, local_rank: int = 0) -> m.RankFailed:
        """Return a failure that no rank caused, of the round that runs here or is being prepared."""
        local = self.local
        number = local.number if local else self._prepared
        rank = local.ranks[local_rank].rank if local and local_rank in local.ranks else 0
        failure = m.RankFailure(self.node, rank, local_rank, kind, at, None, None, text)
        return m.RankFailed(self.node, self.epoch, number, failure)

    def _tell(self, message: m.ToController) -> None:
        """Send to the controller; send again if the connection breaks."""
        name = FACTS.get(type(message))
        if name is not None:
            self.facts[name, message.failure.local_rank if isinstance(message, m.RankFailed) else 0] = message
        self._ports.to_controller(message)

    def _send_all(self, messages: list[m.ToController]) -> None:
        for message in messages:
            self._tell(message)
