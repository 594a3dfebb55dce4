"""The agent's snapshots: arenas in shared memory, and the saver that makes them durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from resilio_hpc.ckpt.saver import messages
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.node_ranks import NodeRanks
from resilio_hpc.launch.agent.saver_link import SaverLink, SaverRequest
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

REFUSED = "the saver process does not take requests"


class LocalSnapshots:
    """What this node holds in memory, and which of it is being written to disk."""

    def __init__(
        self, node: NodeContext, ranks: NodeRanks, tell_rank: Callable[[int, rank_link.AgentMessage], None]
    ) -> None:
        """``tell_rank``: sends a message to a local rank."""
        self._node = node
        self._ranks = ranks
        self._tell_rank = tell_rank
        self.saver = SaverLink(node.local_dir / "saver.log")
        self._pins: deque[arena.Pin] = deque()  # for the saver's persist requests, in their order
        self._checkpoints = str(node.run.path / "checkpoints")
        self._disk_told = self._differs_told = False
        kept = node.options.checkpoints
        self._retention = Retention(kept.keep_checkpoints, kept.keep_every, kept.keep_hours, kept.keep_gb)

    def held(self) -> tuple[m.Held, ...]:
        """Return the whole snapshots, from the arenas' headers."""
        found = arena.scan(self._node.arena_dir)
        return tuple(m.Held(snapshot.rank, snapshot.step, snapshot.world_size) for snapshot in found)

    def forget_after(self, step: int) -> None:
        """Invalidate snapshots of later steps."""
        for later in {snapshot.step for snapshot in arena.scan(self._node.arena_dir) if snapshot.step > step}:
            arena.invalidate(self._node.arena_dir, later)

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """Pin the step's arenas and order the saver to write them."""
        pin = arena.pin(self._node.arena_dir, message.step)
        if pin is None:
            self._ranks.saves.persist_failed(message.round, message.step, "overwritten by a newer snapshot")
            return
        options = self._node.options.checkpoints
        sent = self.saver.send(
            messages.Persist(
                step=message.step, epoch=message.epoch, round=message.round, world_size=world_size,
                node_rank=member.node_rank, arenas=[str(path) for path in pin.paths], directory=self._checkpoints,
                local=options.local_checkpoints, holder=self._node.name,
                bytes_per_s=(options.checkpoint_gb_per_s or 0.0) * 1e9, verify=self._retention.needs_verified_writes,
            )
        )  # fmt: skip
        if sent:
            self._pins.append(pin)
        else:
            pin.release()
            self._ranks.saves.persist_failed(message.round, message.step, REFUSED)

    def commit(self, message: m.CommitStep) -> None:
        """Order the saver to write the manifest."""
        sent = self.saver.send(
            messages.Commit(
                step=message.step, epoch=message.epoch, round=message.round, world_size=message.world_size,
                directory=self._checkpoints, shards=list(message.records),
                retention=self._retention,
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
            if not request.commits:
                self._pins.popleft().release()
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
            else:
                ranks.saves.persist_failed(request.round, request.step, answer.error)
        if self.saver.fileno() is None:
            self._node.record("saver_died")

    def _on_progress(self, request: SaverRequest, progress: messages.Progress) -> None:
        """Pass on the progress of the oldest persist request that has no answer yet."""
        node = self._node
        if isinstance(progress, messages.Local):
            self._pins[0].release()
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
