"""The agent's snapshots: arenas in shared memory, and the saver that makes them durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilio_hpc.ckpt import arena, saver_messages
from resilio_hpc.launch import messages as m
from resilio_hpc.launch.saver_link import SaverLink

if TYPE_CHECKING:
    from resilio_hpc.launch.agent import Agent


class LocalSnapshots:
    """What this node holds in memory, and what is being written from it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.saver = SaverLink(agent.local_dir / "saver.log")
        self._in_flight: tuple[int, int] | None = None  # (round, step)
        self._checkpoints = str(agent.run.path / "checkpoints")

    def held(self) -> tuple[m.Held, ...]:
        """Whole snapshots, from the arenas' headers."""
        found = arena.scan(self._agent.arena_dir)
        return tuple(m.Held(snapshot.rank, snapshot.step, snapshot.world_size) for snapshot in found)

    def forget_after(self, step: int) -> None:
        """Invalidate snapshots of later steps."""
        for later in {snapshot.step for snapshot in arena.scan(self._agent.arena_dir) if snapshot.step > step}:
            arena.invalidate(self._agent.arena_dir, later)

    def persist(self, message: m.Persist, member: m.Member, world_size: int) -> None:
        """Pin the step's arenas and have the saver write them."""
        paths = arena.pin(self._agent.arena_dir, message.step)
        if paths is None:
            self._agent.core.persist_failed(message.round, message.step, "overwritten by a newer snapshot")
            return
        self._in_flight = (message.round, message.step)
        sent = self.saver.send(
            saver_messages.Persist(
                step=message.step, epoch=message.epoch, round=message.round, world_size=world_size,
                node_rank=member.node_rank, arenas=[str(path) for path in paths], directory=self._checkpoints,
            )
        )  # fmt: skip
        if not sent:
            self._failed("the saver process does not take requests")

    def commit(self, message: m.Commit) -> None:
        """Have the saver write the manifest."""
        sent = self.saver.send(
            saver_messages.Commit(
                step=message.step, epoch=message.epoch, round=message.round, world_size=message.world_size,
                directory=self._checkpoints, shards=list(message.records),
                keep_last=self._agent.settings.options.keep_checkpoints,
            )
        )  # fmt: skip
        if not sent:
            self._agent.core.persist_failed(message.round, message.step, "the saver process does not take requests")

    def serve(self) -> None:
        """Take the saver's answers."""
        replies = self.saver.receive()
        if replies is None:
            self._agent.record("saver_died")
            self._failed("the saver process was killed")
            return
        core = self._agent.core
        for reply in replies:
            if isinstance(reply, saver_messages.Persisted):
                arena.unpin(self._agent.arena_dir)
                self._in_flight = None
                core.persisted(reply.round, reply.step, reply.record)
            elif isinstance(reply, saver_messages.Committed):
                core.commit_done(reply.step, reply.seconds)
            else:
                self._failed(reply.error, reply.step)

    def _failed(self, error: str, step: int | None = None) -> None:
        arena.unpin(self._agent.arena_dir)
        in_flight, self._in_flight = self._in_flight, None
        state = self._agent.core.state
        round_number = in_flight[0] if in_flight else (state.round if state else -1)
        number = step if step is not None else (in_flight[1] if in_flight else -1)
        if number >= 0:
            self._agent.core.persist_failed(round_number, number, error)

    def close(self) -> None:
        """End the saver."""
        self.saver.close()
