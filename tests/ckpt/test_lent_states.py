"""States of which a rank has no snapshot: kept, written to disk, and restored in a world of another size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.replication.borrowed_state import Borrowed
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted, SaverFailed
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.boundary_record import keep_record, kept_path
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.core.tiers import Tier
from tests.support.ckpt.lent_states import WORLD, is_state, lent, record, restored, save, state
from tests.support.ckpt.recording_coordinator import RecordingCoordinator


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_what_a_rank_went_on_from_stays_lent_beyond_the_boundaries_that_follow(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6)
    kept = lost_ranks.record_at(memory, 1, 6, own_part(state(1, 6)))
    assert kept is not None and kept[0] == 1
    keep_record(memory, *kept)
    record(memory, 1, 7, 8, 9, life=1)  # another round: its file begins again
    assert lent(memory) == [(1, 6)]
    assert is_state(restored(memory, 1, 6), 1, 6)
    save(memory, 1, 6)
    assert lent(memory) == []
    assert lost_ranks.record_at(memory, 1, 6, b"") is None  # it has a snapshot of its own
    path = kept_path(memory, 1)
    path.write_bytes(path.read_bytes()[:-1])  # torn
    for held in arena.scan(memory):
        if held.rank == 1:
            arena.mark_empty(held.path, 6)
    assert lent(memory) == []


@pytest.mark.parametrize("holders", [(0, 2), (1, 3)])
def test_the_saver_writes_a_step_of_which_each_node_has_one_snapshot(
    memory: Path, tmp_path: Path, holders: tuple[int, int]
) -> None:
    records, checkpoints = [], str(tmp_path / "checkpoints")
    for node, holder in enumerate(holders):
        directory = memory / f"node{node}"
        directory.mkdir()
        save(directory, holder, 6)
        assert lost_ranks.pin(directory, 6) is None  # there is no record yet
        other = holder ^ 1
        record(directory, other, 6)
        pinned = lost_ranks.pin(directory, 6)
        assert pinned is not None
        (pin, missing), paths = pinned, [str(path) for path in pinned[0].paths]
        assert (len(paths), missing) == (1, [other])
        asked = Persist(6, 1, 0, WORLD, node, paths, checkpoints, lent=(other,), memory=str(directory))
        written = saver.serve(asked)
        pin.release()
        assert isinstance(written, Persisted), written
        records.append(written.record)
    committed = saver.serve(Commit(6, 1, 0, WORLD, checkpoints, records))
    assert isinstance(committed, Committed), committed
    assert verify_step(Path(checkpoints), checkpoint_index.manifest_of(Path(checkpoints), 6)) == []
    for rank in range(WORLD):
        here = RecordingCoordinator(memory, Place(rank, rank, WORLD, WORLD, 0, "run"))
        here.restores(RestorePoint(Tier.COMMITTED, 6))
        coordinator.use(here)
        try:
            found = Checkpointer(checkpoints, layout=REPLICATED).restore()
        finally:
            coordinator.use(None)
        assert found is not None and found[0] == 6
        assert is_state(found[1], rank, 6)


def test_in_a_world_of_another_size_a_rank_goes_on_from_what_had_its_place_on_the_node(memory: Path) -> None:
    record(memory, 3, 6)
    for step in (4, 6):
        save(memory, 2, step)
    own = lost_ranks.of_another_world(memory, 0, 6)
    assert isinstance(own, arena.HeldSnapshot) and own.rank == 2
    lent_one = lost_ranks.of_another_world(memory, 1, 6)
    assert isinstance(lent_one, Borrowed) and (lent_one.rank, lent_one.holder.rank) == (3, 2)
    assert lost_ranks.of_another_world(memory, 1, 4) is None
    for place, rank in enumerate((2, 3)):
        here = RecordingCoordinator(memory, Place(place, place, 2, 2, 1, "run"))
        here.restores(RestorePoint(Tier.MEMORY, 6))
        coordinator.use(here)
        try:
            found = Checkpointer(memory / "checkpoints", layout=REPLICATED).restore()
        finally:
            coordinator.use(None)
        assert found is not None and found[0] == 6
        assert is_state(found[1], rank, 6)
    record(memory, 3, 7, 8, life=1)
    assert lost_ranks.of_another_world(memory, 1, 6) == lent_one  # it stays until ranks go on from a later one


def test_tensors_that_are_each_ranks_own_are_of_no_use_in_a_world_of_another_size(memory: Path) -> None:
    for rank in (2, 3):
        save(memory, rank, 6, layout="own")
    assert lost_ranks.of_another_world(memory, 0, 6) is None


def test_what_the_saver_is_to_borrow_and_is_gone_is_an_error_of_the_save(memory: Path, tmp_path: Path) -> None:
    save(memory, 0, 6)
    path = str(arena.scan(memory)[0].path)
    answer = saver.serve(Persist(6, 1, 0, WORLD, 0, [path], str(tmp_path), lent=(1,), memory=str(memory)))
    assert isinstance(answer, SaverFailed)
    assert answer.error == "CheckpointError: step 6: what rank 1 left of it is gone"
