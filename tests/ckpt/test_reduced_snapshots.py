"""Snapshots without what other ranks of the node have: what is kept, and what restores and the saver make of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.reduced_snapshot import say_without
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.saver.messages import Answer, Commit, Committed, Persist, Persisted, SaverFailed
from resilio_hpc.ckpt.saver.saver import serve
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.core.tiers import Tier
from tests.support.ckpt.recording_coordinator import RecordingCoordinator
from tests.support.mounts import mounted
from tests.support.waiting import PATIENCE_S

ROOM = 8 << 20
ONE = ROOM // 8 * 5 // 8  # elements: five eighths of the room, so that there is none for two


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for one whole snapshot. What should go to disk lies there, too."""
    with mounted(tmp_path / "memory", f"size={ROOM}") as directory:
        yield directory


def shared(rank: int, step: int) -> dict[str, Any]:
    """A state of data parallel training: ranks have the same weights; a shard and counters are their own."""
    draw = np.random.default_rng(step)
    return {
        "w": draw.random(ONE // 2), "optimizer": {"moments": draw.random(ONE // 2), "step": step},
        "shard": np.random.default_rng([rank, step]).random(20_000), "statistics": np.full(10, rank + step),
        "rng": b"%d" % rank, "position": {"rank": rank, "file": step},
    }  # fmt: skip


def is_shared(found: Any, rank: int, step: int) -> bool:
    wanted = shared(rank, step)
    arrays = ("w", "shard", "statistics")
    return (
        all(found[name].tobytes() == wanted[name].tobytes() for name in arrays)
        and found["optimizer"]["moments"].tobytes() == wanted["optimizer"]["moments"].tobytes()
        and (found["rng"], found["position"], found["optimizer"]["step"]) == (wanted["rng"], wanted["position"], step)
    )


class Node:
    """Ranks of one node with layout REPLICATED, in this process."""

    def __init__(self, memory: Path, checkpoints: Path, ranks: tuple[int, ...] = (0, 1), world: int = 2) -> None:
        self.memory, self.checkpoints = memory, checkpoints
        self.told = {rank: RecordingCoordinator(memory, Place(rank, at, world, len(ranks), 0, "run"))
                     for at, rank in enumerate(ranks)}  # fmt: skip
        self.saved = {rank: self.checkpointer(rank) for rank in ranks}

    def checkpointer(self, rank: int) -> Checkpointer:
        coordinator.use(self.told[rank])
        try:
            return Checkpointer(self.checkpoints, layout=REPLICATED, local=self.memory / "spill")
        finally:
            coordinator.use(None)

    def save(self, step: int, rank: int, state: dict[str, Any] | None = None) -> str:
        return self.saved[rank].save(step, state or shared(rank, step)).error

    def persist(self, step: int) -> Answer:
        """The saver writes the node's file."""
        pin = arena.pin(self.memory, step)
        assert pin is not None
        paths, first = [str(path) for path in pin.paths], next(iter(self.told.values())).place
        asked = Persist(
            step, 1, 0, first.world_size, first.rank // first.local_world_size, paths, str(self.checkpoints)
        )
        try:
            return serve(msgspec.structs.replace(asked, rank_0_s=PATIENCE_S))
        finally:
            pin.release()

    def restored(self, rank: int, *points: RestorePoint) -> tuple[int, Any]:
        self.told[rank].restores(*points)
        return self.checkpointer(rank).restore() or (-1, None)


@pytest.fixture
def node(memory: Path, tmp_path: Path) -> Node:
    return Node(memory, tmp_path / "checkpoints")


def test_a_rank_without_room_keeps_what_no_other_rank_of_its_node_has(node: Node) -> None:
    for step in (1, 2, 3):
        assert [node.save(step, rank) for rank in (0, 1)] == ["", ""]
        sizes = {held.rank: held.size_bytes for held in arena.scan(node.memory) if held.step == step}
        assert sizes[1] < 300_000 < 5_000_000 < sizes[0]
        for rank in (0, 1):
            at, found = node.restored(rank, RestorePoint(Tier.MEMORY, step))
            assert at == step and is_shared(found, rank, step)
    assert node.told[1].rooms == [(1, "reduced")]


def test_the_step_is_committed_whole_from_reduced_snapshots(node: Node) -> None:
    for rank in (0, 1):
        assert node.save(1, rank) == ""
    written = node.persist(1)
    assert isinstance(written, Persisted), written
    assert isinstance(serve(Commit(1, 1, 0, 2, str(node.checkpoints), [written.record])), Committed)
    for rank in (0, 1):
        step, found = node.restored(rank, RestorePoint(Tier.COMMITTED, 1))
        assert step == 1 and is_shared(found, rank, 1)


def test_a_replica_that_is_gone_is_said_and_the_older_whole_step_is_restored(node: Node) -> None:
    for rank in (0, 1):
        node.save(1, rank)
    written = node.persist(1)
    assert isinstance(written, Persisted)
    serve(Commit(1, 1, 0, 2, str(node.checkpoints), [written.record]))
    for rank in (0, 1):
        node.save(2, rank)
    for slot in node.memory.glob("rank0.slot*"):
        arena.mark_empty(slot, 2)
    newest, older = RestorePoint(Tier.MEMORY, 2), RestorePoint(Tier.COMMITTED, 1)
    step, found = node.restored(1, newest, older)
    assert step == 1 and is_shared(found, 1, 1)
    assert node.told[1].failed == [newest]


def test_a_rank_whose_tensors_no_other_rank_has_says_that_it_is_not_saved(node: Node) -> None:
    node.save(1, 0)
    other = shared(1, 1) | {"w": np.zeros(ONE // 2), "optimizer": {"moments": np.ones(ONE), "step": 1}}
    assert "No space left on device" in node.save(1, 1, other)
    assert [held.rank for held in arena.scan(node.memory)] == [0]


def test_where_rank_0_has_no_room_the_others_give_theirs(node: Node) -> None:
    assert node.save(1, 1) == ""
    assert "No space left on device" in node.save(1, 0)
    say_without(node.memory, 0, 0, 2)  # rank 0 has tried before the other one gave its room
    assert "rank 0 needs the room" in node.save(2, 1)
    assert node.save(3, 0) == node.save(3, 1) == ""
    assert node.save(4, 0) == node.save(4, 1) == ""
    for rank in (0, 1):
        step, found = node.restored(rank, RestorePoint(Tier.MEMORY, 4))
        assert step == 4 and is_shared(found, rank, 4)
    assert [room for _, room in node.told[0].rooms] == ["none", "memory", "one"]


def test_what_differs_from_rank_0_on_another_node_and_was_left_out_is_not_committed(
    memory: Path, tmp_path: Path
) -> None:
    node = Node(memory, tmp_path / "checkpoints", ranks=(2, 3), world=4)
    for rank in (2, 3):
        assert node.save(1, rank) == ""
    of_rank_0 = [record for record in ArenaSource(arena.scan(memory)[0].path).tensors if record.path != "w"]
    staging = staging_directory(node.checkpoints, 1, 1, 0)
    staging.mkdir(parents=True)
    rows = [(one.path, one.kind, one.dtype, one.shape, one.checksums) for one in of_rank_0]
    (staging / ".rank-0.json").write_bytes(msgspec.json.encode(rows))
    failed = node.persist(1)
    assert isinstance(failed, SaverFailed)
    assert "w of rank 3 is another tensor than rank 0's, and its snapshot has left it out" in failed.error
