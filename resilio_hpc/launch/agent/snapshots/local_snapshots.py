"""The agent's snapshots: arenas in shared memory, and the saver that makes them durable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.format.manifest import REPLICATED
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.saver import messages
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.agent.snapshots.saver_link import SaverLink, SaverRequest
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

REFUSED = "the saver process does not take requests"
SAVED_AGAIN_S = 30.0  # for the other ranks of this node to take a step again that one of them has taken again
REPLACED = "overwritten by a newer snapshot"


class PersistOrder(NamedTuple):
    """An order to write a step, and the place of this node in the round."""

    message: m.PersistStep
    member: m.Member
    world_size: int


class LocalSnapshots:
    """What this node holds in memory, and which of it is being written to disk."""

    def __init__(
        self, node: NodeContext, ranks: NodeRanks, tell_rank: Callable[[int, rank_link.AgentMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``tell_rank``: sends a message to a local rank."""
        self._clock = clock
        self._node = node
        self._ranks = ranks
        self._tell_rank = tell_rank
        self.saver = SaverLink(node.local_dir / "saver.log")
        self._pins: deque[tuple[arena.Pin, PersistOrder]] = deque()  # of the saver's persist requests, in their order
        self._waiting: tuple[PersistOrder, float, str] | None = None  # until when, and what is wrong if it lasts longer
        self._checkpoints = str(node.run.path / "checkpoints")
        self._disk_told = self._differs_told = False
        kept = node.options.checkpoints
        self._retention = Retention(kept.keep_checkpoints, kept.keep_every, kept.keep_hours, kept.keep_gb)

    def held(self) -> tuple[m.Held, ...]:
        """Return the whole snapshots, from the arenas' headers, and what ranks can restore from another rank's."""
        directory = self._node.arena_dir
        lent = [(one.rank, one.holder) for one in lost_ranks.lent(directory)]
        found = [(held.rank, held) for held in arena.scan(directory)] + lent
        return tuple(
            m.Held(rank, held.step, held.world_size, is_shared=held.layout == REPLICATED) for rank, held in found
        )

    def forget_after(self, step: int) -> None:
        """Invalidate snapshots of later steps."""
        for later in {snapshot.step for snapshot in arena.scan(self._node.arena_dir) if snapshot.step > step}:
            arena.invalidate(self._node.arena_dir, later)

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """Pin the step's arenas and order the saver to write them."""
        self._persist(PersistOrder(message, member, world_size))

    def _persist(self, order: PersistOrder) -> None:
        message, member, world_size = order
        found = lost_ranks.pin(self._node.arena_dir, message.step)
        if found is None:
            self._not_written(order, REPLACED)
            return
        pin, lent = found
        local = self._ranks.local
        if local is None or local.restore is None or message.step > local.restore.step:
            # whole on all nodes: nothing goes back to snapshots of ranks that had other numbers
            arena.remove_slots(self._node.arena_dir, keep=member.ranks)
        options = self._node.options.checkpoints
        sent = self.saver.send(
            messages.Persist(
                step=message.step, epoch=message.epoch, round=message.round, world_size=world_size,
                node_rank=member.node_rank, arenas=[str(path) for path in pin.paths], directory=self._checkpoints,
                local=options.local_checkpoints, holder=self._node.name,
                bytes_per_s=(options.checkpoint_gb_per_s or 0.0) * 1e9, verify=self._retention.needs_verified_writes,
                local_keep=options.keep_local, lent=tuple(lent), memory=str(self._node.arena_dir),
            )
        )  # fmt: skip
        if sent:
            self._pins.append((pin, order))
        else:
            pin.release()
            self._ranks.saves.persist_failed(message.round, message.step, REFUSED)

    def _not_written(self, order: PersistOrder, error: str) -> None:
        """Report a failure, unless ranks take snapshots of the step that their round began with: it is written, then.

        Ranks that restart after their last step do so, and each drops the snapshot from which it was restored.
        """
        step, number, local = order.message.step, order.message.round, self._ranks.local
        is_restored = local is not None and local.restore is not None and local.restore.step == step
        again = is_restored and any((one.step, one.round) == (step, number) for one in arena.scan(self._node.arena_dir))
        if again and self._waiting is None:
            self._waiting = (order, self._clock() + SAVED_AGAIN_S, error)
        else:
            self._ranks.saves.persist_failed(number, step, error)

    def tick(self) -> None:
        """Do what waits for ranks: go on with a step that they have taken again, and end the pause for the last one."""
        local = self._ranks.local
        if local is not None and local.section == rank_link.LAST_CHECKPOINT:
            self.saver.resume()  # a restart after the last step does no other
        self.saver.tick()
        if self._waiting is None:
            return
        order, until, error = self._waiting
        if local is None or local.number != order.message.round:
            self._waiting = None
        elif (found := lost_ranks.pin(self._node.arena_dir, order.message.step)) is not None:
            found[0].release()
            self._waiting = None
            self._persist(order)
        elif self._clock() > until:
            self._waiting = None
            self._ranks.saves.persist_failed(order.message.round, order.message.step, error)

    def commit(self, message: m.CommitStep) -> None:
        """Order the saver to write the manifest."""
        sent = self.saver.send(
            messages.Commit(
                step=message.step, epoch=message.epoch, round=message.round, world_size=message.world_size,
                directory=self._checkpoints, shards=list(message.records),
                retention=msgspec.structs.replace(self._retention, keep_step=message.verified),
            )
        )  # fmt: skip
        if not sent:
            self._ranks.saves.persist_failed(message.round, message.step, REFUSED)

    def ranks_stop(self) -> None:
        """Stop the saver's work on the round.

        Files that are not written yet have no use, and the restart gets the processors.
        """
        self.saver.abandon()
        self.saver.pause()

    def serve(self) -> None:
        """Take the saver's answers."""
        ranks = self._ranks
        for request, answer in self.saver.receive():
            if isinstance(answer, messages.Progress):
                self._on_progress(request, answer)
                continue
            order = None
            if not request.commits:
                pin, order = self._pins.popleft()
                pin.release()
            if isinstance(answer, messages.Persisted):
                ranks.saves.persisted(request.round, request.step, answer.record)
            elif isinstance(answer, messages.Committed):
                ranks.saves.commit_done(request.round, request.step, answer.seconds)
                if answer.short:
                    self._node.record("space_short", step=request.step, why=answer.short)
                    self._node.say(words("space_short", {"why": answer.short}))
                if answer.differs and not self._differs_told:
                    self._differs_told = True
                    self._node.record("replicas_differ", step=request.step, place=answer.differs)
                    self._node.say(words("replicas_differ", {"place": answer.differs}))
            elif order is not None and self._is_replaced(pin, order):
                self._not_written(order, answer.error)
            else:
                ranks.saves.persist_failed(request.round, request.step, answer.error)
        if self.saver.fileno() is None:
            self._node.record("saver_died")

    def _is_replaced(self, pin: arena.Pin, order: PersistOrder) -> bool:
        """Return whether ranks have taken the step again meanwhile, into other arenas than were to be written."""
        there = {held.path for held in arena.scan(self._node.arena_dir) if held.step == order.message.step}
        return not there.issuperset(pin.paths)

    def _on_progress(self, request: SaverRequest, progress: messages.Progress) -> None:
        """Pass on the progress of the oldest persist request that has no answer yet."""
        node = self._node
        if isinstance(progress, messages.Local):
            self._pins[0][0].release()
            node.record("local", step=progress.step, size_bytes=progress.size_bytes, seconds=progress.seconds)
            local = self._ranks.local
            for rank in local.attached if local is not None and local.number == request.round else ():
                self._tell_rank(rank, rank_link.SaveProgress(progress.step, Stage.LOCAL))
            return
        node.record("local_failed", step=progress.step, error=progress.error)
        if not self._disk_told:
            self._disk_told = True
            node.say(f"{node.name}: {progress.error}")

    def close(self) -> None:
        """End the saver."""
        self.saver.close()
