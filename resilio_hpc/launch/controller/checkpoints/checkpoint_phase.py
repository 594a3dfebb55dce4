"""The controller's part for checkpoints: which step is made durable, and what the next round restores. Pure."""

from __future__ import annotations

from collections.abc import Collection

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.core.tiers import Stage, Tier
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.checkpoints import replica_placement
from resilio_hpc.launch.controller.checkpoints.commits import CommitTracker
from resilio_hpc.launch.controller.checkpoints.ordered_saves import OrderedSaves
from resilio_hpc.launch.controller.checkpoints.round_layouts import of_another_layout
from resilio_hpc.launch.controller.facts.intents import Intend, StepAbandoned, StepCommitted
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import QueryHistory
from resilio_hpc.launch.protocol import messages as m

SETTLE_S = 10.0  # seconds that a round that goes back waits for the result of the last commit
AGAIN_S = 10.0  # seconds after which an order without an answer is repeated
CheckpointMessage = m.SnapshotWhole | m.StepPersisted | m.PersistFailed | m.ManifestWritten


class CheckpointPhase:
    """Tracks the step in flight, and the question to the run directory whether the step before was committed."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._commits = CommitTracker(known=run.committed_steps)
        self._unanswered: tuple[str, int] | None = None  # the node and step of the last order to commit
        self._asked = False  # whether the run directory was asked if that order was carried out
        self._settle_by = 0.0
        self._next_again = 0.0
        self._of_another_world = -1  # the step that ranks restore from snapshots of a world of another size
        self._goes_on_from: int | None = None  # the step that this round's ranks started from; None: not started
        # of each step on its way: seconds for which training waited for its snapshot
        self._blocked_s: dict[int, float] = {}
        self._saves_began: dict[int, float] = {}  # step → when its first snapshot was whole, monotonic
        self.ordered = OrderedSaves(run, out, self._saves_began.__contains__)

    def awaits(self, step: int) -> int:
        """Return the step that is, or will be, made durable; -1 without one.

        ``step`` will be where every member holds it.
        """
        if self._commits.in_flight >= 0:
            return self._commits.in_flight
        return -1 if self._commits.is_settled(step) else step

    def begin_round(self, nodes: Collection[str]) -> None:
        """Begin a round; the step in flight is abandoned."""
        self._commits.begin(nodes)
        self._asked = False
        self._blocked_s.clear()
        self._settle_by = self._run.now() + SETTLE_S
        self._goes_on_from = None

    def restored(self, restore: m.RestorePoint | None) -> None:
        """Make the restored step durable if it lies only in memory: the ranks start from ``restore``."""
        self._goes_on_from = -1 if restore is None else restore.step
        self._run.not_after = None
        for member in self._run.members if self._run.config.replica_copies else ():
            partner = replica_placement.partner_of(member, self._run)
            if partner is not None:
                self._out.send(member.node, m.KeepCopies(self._run.epoch, self._run.round, partner))
        if restore is not None and restore.source is Tier.MEMORY and restore.step != self._of_another_world:
            for member in self._run.members:
                self._persist(self._commits.snapshot_whole(member.node, restore.step))

    def tick(self) -> None:
        """Repeat orders that have no answer: whatever lost them, a round must not go on without commits.

        A user's order goes on.
        """
        self.ordered.tick()
        if self._run.now() >= self._next_again:
            self._order_persist(self._commits.unwritten)
            self._order_commit()

    def order_again(self, node: str) -> None:
        """Repeat to ``node`` the orders that it may have missed."""
        if self._commits.in_flight >= 0:
            self._order_persist((node,))
            if node == self._run.members[0].node:
                self._order_commit()

    def handle(self, message: CheckpointMessage) -> None:
        """Take a node's message about the progress of a checkpoint."""
        run = self._run
        if not isinstance(message, m.SnapshotWhole | m.StepPersisted) and self._unanswered == (
            message.node,
            message.step,
        ):
            self._unanswered = None
        if isinstance(message, m.ManifestWritten):
            self._committed(message)
        elif message.round != run.round:
            return  # of an earlier life: its file may be overwritten already
        elif isinstance(message, m.SnapshotWhole):
            run.bad_copies.discard(m.RestorePoint(Tier.MEMORY, message.step))
            self._saves_began.setdefault(message.step, run.now())
            self._blocked_s[message.step] = max(self._blocked_s.get(message.step, 0.0), message.blocked_s)
            self._persist(self._commits.snapshot_whole(message.node, message.step))
        elif isinstance(message, m.StepPersisted):
            if self._commits.persisted(message.node, message.step, message.record):
                self._order_commit()
        else:
            self._run.saves_fail = True
            self._out.record("persist_failed", node=message.node, step=message.step, error=message.error)
            self._given_up(message.step, message.error)

    def epoch_recorded(self) -> None:
        """Take note that no older epoch can commit any more, and that its commits are known: this one may commit."""
        self._order_commit()

    def _order_commit(self) -> None:
        """Order the manifest, if every file is durable and this epoch may commit."""
        run, commits = self._run, self._commits
        if commits.records and run.recorded:
            verified = max(run.verified_steps, default=-1)
            order = m.CommitStep(run.epoch, run.round, commits.in_flight, run.world_size, commits.records, verified)
            self._unanswered = (run.members[0].node, order.step)
            self._next_again = run.now() + AGAIN_S
            self._out.send(run.members[0].node, order)

    def _committed(self, message: m.ManifestWritten) -> None:
        run, goes_on_from = self._run, self._goes_on_from
        if message.step in self._commits.known and message.step != self._commits.in_flight:
            return  # a repeated message
        if message.round != run.round and goes_on_from is not None and message.step > goes_on_from:
            # The run directory hung for longer than a round that had to go back could wait. That step is whole, but it
            # is no ancestor of what is computed now: a step of this life takes its place.
            self._out.record("commit_late", step=message.step, round=message.round)
            return
        self._note_disks(message.step)
        following = self._commits.commit(message.step)
        run.bad_copies.discard(m.RestorePoint(Tier.COMMITTED, message.step))
        run.without_progress, run.saves_fail = 0, False
        save_s = self._measure_save(message.step)
        self._out.record(
            "committed", step=message.step, seconds=message.seconds, epoch=run.epoch,
            blocked_s=self._blocked_s.get(message.step), save_s=save_s,
        )  # fmt: skip
        self._blocked_s = {step: waited for step, waited in self._blocked_s.items() if step > message.step}
        self._out.broadcast(m.StageReached(run.epoch, message.step, Stage.COMMITTED))
        self._persist(following)
        self._intend(StepCommitted())

    def _note_disks(self, step: int) -> None:
        """Take note of whose own disks have files of a step that is durable now."""
        run = self._run
        for record in self._commits.records if step == self._commits.in_flight else ():
            ranks = sorted(rank.rank for rank in record.ranks)
            if ranks:
                run.note_copies(record.node, (OwnCopy(step, ranks[0], len(ranks), run.world_size),))

    def _measure_save(self, step: int) -> float | None:
        """Return how long the save of ``step`` took, which is durable now; None where its beginning is not known."""
        run, began = self._run, self._saves_began.get(step)
        took_s = None if began is None else run.now() - began
        if took_s is not None:
            run.save_s = max(run.save_s * 0.8, took_s)
            run.last_save_s = took_s
        for known in [known for known in self._saves_began if known <= step]:
            del self._saves_began[known]
        return None if took_s is None else round(took_s, 3)

    def _given_up(self, step: int, error: str) -> None:
        following = self._commits.abandon(step)
        self._out.broadcast(m.StageReached(self._run.epoch, step, Stage.FAILED, error))
        self._persist(following)
        self._intend(StepAbandoned())

    def _persist(self, step: int | None) -> None:
        run = self._run
        while step is not None and run.config.mode == Mode.OBSERVE:
            self._out.broadcast(m.StageReached(run.epoch, step, Stage.COMMITTED))  # no rank may wait for it
            step = self._commits.abandon(step)
        if step is not None:
            self._order_persist(self._commits.unwritten)

    def _order_persist(self, nodes: Collection[str]) -> None:
        """Order ``nodes`` to write their files of the step in flight."""
        run, step = self._run, self._commits.in_flight
        self._next_again = run.now() + AGAIN_S
        for member in run.members:
            if member.node in nodes:
                partner = replica_placement.partner_of(member, run)
                self._out.send(member.node, m.PersistStep(run.epoch, run.round, step, partner))

    def past_told(self) -> None:
        """Go on: the run directory has told which steps are committed."""
        if self._asked:
            self._unanswered = None

    def may_grow(self, restore: m.RestorePoint | None) -> bool:
        """Return whether a step beyond ``restore`` may be committed: an order to commit has no answer yet."""
        if self._unanswered is None:
            return False
        node, step = self._unanswered
        if restore is not None and restore.source is Tier.MEMORY and restore.step >= step:
            return False  # of the same life
        now = self._run.now()
        if now >= self._settle_by and self._asked:
            self._unanswered = None  # the run directory hangs
            return False
        if not self._asked and (node not in self._run.agents or now >= self._settle_by):
            self._asked = True
            self._settle_by = now + SETTLE_S
            self._out.act(QueryHistory())
        return True

    def restore_plan(self) -> tuple[m.RestorePoint | None, tuple[m.MissingSnapshot, ...]]:
        """Return the newest step that every rank can restore, and the snapshots to fetch to its node before."""
        run = self._run
        bad = {copy.step for copy in run.bad_copies if copy.source is Tier.MEMORY}
        found = replica_placement.in_memory(run)
        bad |= of_another_layout(run, [*found.own, *found.elsewhere])
        choice = replica_placement.restore_choice(found, run.committed, bad, run.not_after)
        self._of_another_world = choice.of_another_world
        return choice.point, choice.fetches
