"""The agent's decisions about its ranks: which round they run, when they stop, what the controller hears. Pure.

All effects go through ``Ports``. Orders may come twice, since the controller repeats them after a broken connection. So
may answers. Each side ignores the second copy.
"""

from __future__ import annotations

import msgspec

from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.diagnose.hangs.rank_sight import RankSight
from resilio_hpc.launch.agent.decisions.agent_ports import AT_ONCE, NO_GRACE, Ports
from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.agent.decisions.rank_ends import RankEnds
from resilio_hpc.launch.agent.decisions.rank_stopping import RankOrder, StopState, carry_out
from resilio_hpc.launch.agent.decisions.round_store import RoundStore
from resilio_hpc.launch.agent.decisions.save_orders import SaveOrders, Saving
from resilio_hpc.launch.agent.decisions.time_reports import TimeReports
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow
from resilio_hpc.launch.workers.rank_records import RankRecords

LAST_GRACE_S = 1.0  # seconds from SIGTERM to SIGKILL at the end of a run
OfRound = Saving | RankOrder | m.LookAtRanks
"""Orders that hold for the ranks of one round."""


class NodeRanks:
    """One node's ranks over all rounds: what runs, what the controller ordered, what the controller hears.

    ``slots``: ranks that the node's devices allow. ``ready``: ranks would start at once. ``alive``: some may run.
    ``lease``: until when they may, in monotonic seconds.
    """

    def __init__(
        self, node: str, slots: int, last: m.RoundState | None, ports: Ports, graces: Graces = NO_GRACE
    ) -> None:
        self.node = node
        self.slots = slots
        self.ready = True
        self.state: m.RoundState | None = last
        self.local: LocalRound | None = None
        self.ending: m.End | None = None
        self._ports = ports
        self.reports = ControllerReports(node, ports)
        self.times = TimeReports(self.reports)
        self.store = RoundStore(ports, self.reports)
        self.saves = SaveOrders(ports, self.reports)
        self.lease = ports.monotonic()
        self._waiting_start: m.Start | None = None  # waits for a lease
        self._prepared = -1  # the round of the last Prepare of this epoch
        self.highest_round = last.round if last else -1
        self._started_round = -1  # the last round whose ranks were started in this epoch
        self._graces = graces
        self.stop = StopState()
        self.alive = False
        self.kept: frozenset[int] = frozenset()  # local ranks that wait for the next round in their processes
        self._records = RankRecords()
        self.ends = RankEnds(self.reports, self.stop)

    @property
    def epoch(self) -> int:
        """Return the epoch of the controller that is followed."""
        return self.reports.epoch

    # -- the controller's orders -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Drop the orders of a former controller. For the same controller again, keep them."""
        if epoch == self.epoch:
            return
        self.reports.epoch = epoch
        self._prepared = self._started_round = -1
        self._waiting_start = None
        self.reports.clear()

    def prepare(self, message: m.Prepare) -> None:
        """Stop ranks of earlier rounds, open the store if asked."""
        if message.round < self._prepared:
            return
        if message.round > self._prepared:
            self.reports.clear()
            self._waiting_start = None
        self._prepared = message.round
        if message.cause is not None:
            self._ports.services.judge(message.cause)
        self.highest_round = max(self.highest_round, message.round)
        if message.open_store:
            self.store.ask(message.round)
        if self._started_round == message.round:
            return  # a repeated, late order: this round runs already
        ranks = None if self.stop.under_way else self.local
        if ranks is not None and self._ports.services.save_last_step(ranks, message.last_step):
            return
        self._end_round()

    def last_step_saved(self) -> None:
        """End the ranks of the round before: the step that they finished last is saved, or cannot be."""
        if self.local is not None and self._prepared > self.local.number and not self.stop.under_way:
            self._end_round()

    def ranks_left(self, kept: frozenset[int]) -> None:
        """End the other ranks: these local ones have left the round before, and wait for the next one."""
        if self.local is not None and self._prepared > self.local.number and not self.stop.under_way:
            self._stop_ranks(StopHow(self._graces.failure, keep=kept))

    def _end_round(self) -> None:
        """End the ranks of the round before, but for those that can leave it."""
        ranks = None if self.stop.under_way else self.local
        if ranks is not None and self._ports.services.keep_ranks(ranks):
            return
        if self.alive or self.stop.under_way:
            self._stop_ranks(StopHow(self._graces.failure, keep=self.kept))
        else:
            self._say_stopped()

    def _stop_ranks(self, how: StopHow = AT_ONCE) -> None:
        self.kept = how.keep
        self.ends.before, self.local = self.local or self.ends.before, None
        if self.stop.order(how, self._ports.unix()):
            self._ports.services.stop_ranks(how, self._prepared)

    def _say_stopped(self) -> None:
        if self._prepared < 0 or self._started_round == self._prepared:
            return
        known = self.state.life if self.state else m.NO_LIFE
        held, completed = self._ports.services.held(), self.ends.completed(known)
        stopped = m.RanksStopped(self.node, self.epoch, self._prepared, held, known, completed, self.ends.echoes)
        self._ports.to_controller(stopped)

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
        self._ports.services.forget_snapshots_after(step, life)
        self._ports.services.judge(message.cause)
        self.state = message.state
        self._ports.keep(message.state)
        self.saves.committed |= set(message.state.committed)
        self.highest_round = max(self.highest_round, number)
        self._started_round = number
        self.ends.begin()
        self._waiting_start = None
        if member is None:
            if self.alive:  # the other nodes went on without these ranks, so their life is over
                self._stop_ranks()
            self.local = None
            return
        self.local = LocalRound(self.node, message.state, member, message.restore)
        if self.stop.under_way or self._prepared != number:
            self.reports.tell(self._failure("spawn", "this node was not prepared for the round", self._ports.unix()))
            return
        self._waiting_start = message
        self.start_when_leased()

    def start_when_leased(self) -> None:
        """Start the ranks that wait for a lease: a controller's first Beat may come after its Start."""
        start = self._waiting_start
        if start is None or self.local is None or self.stop.under_way or self._ports.monotonic() > self.lease:
            return
        self._waiting_start = None
        self.alive, self.kept = True, frozenset()
        self._ports.services.spawn(self.local, start)

    def stage_reached(self, message: m.StageReached) -> None:
        """Tell the ranks that a checkpoint is durable, or failed."""
        self.saves.stage_reached(message, self.local.attached if self.local else ())

    def during_round(self, message: OfRound) -> None:
        """Carry out an order for the ranks of the current round."""
        local = self.local
        if local is None or message.round != local.number:
            return
        if isinstance(message, Saving):
            world = sum(member.local_world_size for member in self.state.members) if self.state else 0
            self.saves.write(message, local, world, self.lease)
        elif isinstance(message, m.LookAtRanks):
            self._ports.services.look_at_ranks(message)
        else:
            self.reports.tell_all(carry_out(message, local, self._ports.services))

    def ranks_seen(self, number: int, ranks: tuple[RankSight, ...]) -> None:
        """Take what was seen. It is not repeated after a broken connection: the controller asks again."""
        if self.local is not None:
            self._ports.to_controller(m.RanksSeen(self.node, self.epoch, self.local.number, number, ranks))

    def end(self, message: m.End) -> None:
        """End the ranks, then this agent."""
        self.ending = message
        self.local, self.kept = None, frozenset()
        self._ports.services.judge(message.cause)
        if self.alive or self.stop.under_way:
            self.stop.under_way = True
            well = message.verdict == "completed"
            how = StopHow(self._graces.left_running if well else LAST_GRACE_S, for_good=True, well=well)
            self._ports.services.stop_ranks(how, 1 << 30)
        else:
            self._leave()

    def _leave(self) -> None:
        assert self.ending is not None
        self._ports.to_controller(m.Goodbye(self.node, self.epoch, self.ending.verdict))
        self._ports.leave(self.ending.verdict, self.ending.exit_code)

    def end_lease(self) -> None:
        """Stop the ranks: without a lease, the controller may start other ranks in their place."""
        if self.stop.at_once:
            return
        local = self.local
        self._ports.record("lease_ended", round=local.number if local else -1)
        if local is not None:
            self.reports.tell(self._failure("lease_ended", "no word from the controller", self._ports.unix()))
        self._stop_ranks()

    # -- the node's own events ---------------------------------------------------------------------------------

    def all_stopped(self) -> None:
        """Take note that every rank and all its descendants are gone."""
        self.stop.over()
        self.alive = bool(self.kept)
        self.ends.before, self.local = self.local or self.ends.before, None
        if self.ending is not None:
            self._leave()
        else:
            self._say_stopped()

    def store_ready(self, round_number: int, port: int) -> None:
        """Take note that the store of a round is open."""
        self.store.ready(round_number, port)

    def ranks_started(self, round_number: int, seconds: float, mode: str) -> None:
        """Take note that all local ranks run."""
        self.reports.tell(m.RanksStarted(self.node, self.epoch, round_number, seconds, mode))

    def copies_failed(self, round_number: int, restore: m.RestorePoint, error: str) -> None:
        """Take note that snapshots for ranks of this node could not be fetched."""
        if self.local is not None and self.local.number == round_number and not self.stop.under_way:
            text = f"{restore.source} {restore.step}: {error}"
            self.reports.tell(self._failure("restore_failed", text, self._ports.unix(), bad=restore))

    def store_died(self, round_number: int, error: str, at: float) -> None:
        """Ask for another round: the rendezvous store is gone, so its ranks cannot meet."""
        if round_number == self._prepared:
            self.store.lost()
            self.reports.tell(self._failure("store_lost", f"rendezvous store: {error}", at))

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
        self.reports.tell_all(answers)
        if self.state is not None and any(isinstance(answer, m.FirstStep) for answer in answers):
            self.state = msgspec.structs.replace(self.state, steps_reported=True)  # the next controller needs to know
            self._ports.keep(self.state)
        if isinstance(message, rank_link.SnapshotTaken) and self.saves.repeats(message.step, local):
            self._ports.services.tell_rank(local_rank, rank_link.SaveProgress(message.step, Stage.COMMITTED))
        for kind, fields in self._records.of(round_number, local.ranks[local_rank].rank, message):
            self._ports.record(kind, node=self.node, **fields)
        if isinstance(message, rank_link.Attach):
            for word in local.pending_stop():
                self._ports.services.tell_rank(local_rank, word)

    def spawn_failed(self, local_rank: int, error: str, at: float) -> None:
        """Take note that a rank could not be started."""
        if self.local is not None and not self.stop.under_way:
            self.reports.tell(self._failure("spawn", error, at, local_rank))

    def spawner_died(self, at: float) -> None:
        """Take note that the spawner is gone, and its ranks and stores with it. A new one is being started."""
        was_needed = (self.local is not None and self.alive) or self.store.round == self._prepared >= 0
        if was_needed and self.ending is None:
            self.reports.tell(self._failure("spawner_lost", "the process that forks ranks was killed", at))
        self.store.lost()
        self.kept = frozenset()
        self.all_stopped()

    def _failure(self, kind: str, why: str, at: float, of: int = 0, bad: m.RestorePoint | None = None) -> m.RankFailed:
        return self.reports.node_failure(self.local, self._prepared, (kind, why), at, of, bad)
