"""Which ranks hold the same parts of tensors, and a lost rank's state that is made of another one's parts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.own_part import own_part, own_paths
from resilio_hpc.ckpt.state.parts_held import PartsHeld, declared_group, parts_held
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import UsageError
from tests.support.ckpt.replicator_process import POOL

WORLD, STEP = 4, 6  # ranks 0 and 2 have one half of the tensor, 1 and 3 the other one


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


def state(rank: int) -> dict[str, Any]:
    half = rank % 2
    part = Slab(np.arange(half * 500, half * 500 + 500) * STEP, (1000,), (half * 500,), rank // 2, copies=2)
    return {"w": part, "count": torch.tensor(STEP), "random": torch.full((40,), rank), "rank": rank}


def parts(rank: int) -> PartsHeld:
    found = parts_held(flatten(state(rank)).leaves, own_paths(state(rank)))
    assert found is not None
    return found


def save(node: Path, rank: int) -> None:
    pair = ArenaPair(node, Owner(rank, rank, WORLD, WORLD, 0, "own", "run"), node / "spill")
    Snapshot(pair, STEP, flatten(state(rank)), POOL).finish()


def leave_record(node: Path, rank: int) -> None:
    RecordWriter(node, rank, WORLD, 0).write(STEP, own_part(state(rank), parts(rank)), False)


def test_ranks_with_the_same_parts_are_of_one_group() -> None:
    groups = [parts(rank).group for rank in range(WORLD)]
    assert groups[0] == groups[2] != groups[1] == groups[3]
    assert [parts(rank).replicas for rank in range(WORLD)] == [b"\0", b"\0", b"\1", b"\1"]


@pytest.mark.parametrize(
    "changed",
    [
        {"w": replace(state(0)["w"], copies=1)},  # FSDP: no other rank has it
        {"plain": np.zeros(300_000)},  # not known to be the same elsewhere
        {"w": 1},  # no parts at all
    ],
)
def test_what_no_other_rank_is_known_to_have_is_of_no_group(changed: dict[str, Any]) -> None:
    other = state(0) | changed
    assert parts_held(flatten(other).leaves, own_paths(other)) is None


def test_a_lost_ranks_state_is_made_of_the_parts_of_its_group(memory: Path) -> None:
    leave_record(memory, 1)
    for rank in (0, 2):
        save(memory, rank)
    assert lost_ranks.lent(memory) == []  # they have the other half
    save(memory, 3)
    (found,) = lost_ranks.lent(memory)
    assert (found.rank, found.holder.rank) == (1, 3)
    assert lost_ranks.whole_step(memory, range(WORLD), 0) == (STEP, [1])
    wanted = state(1)
    with BorrowedSource(found) as source:
        (record,) = [one for one in source.tensors if one.slab is not None]
        assert record.slab is not None
        assert record.slab.replica == 0  # its own number: replica 0 is what goes to disk
        target = state(1) | {"w": replace(wanted["w"], tensor=np.zeros(500, dtype=np.int64))}
        back = restore(source, target, POOL)
    assert (back["w"].tensor == wanted["w"].tensor).all()
    assert bool((back["random"] == wanted["random"]).all())
    assert (back["rank"], int(back["count"])) == (1, STEP)


def test_a_lost_ranks_own_part_may_be_larger_than_the_room_behind_the_other_ones_snapshot(memory: Path) -> None:
    own = {"random": torch.arange(7000)}  # 56 kB
    RecordWriter(memory, 1, WORLD, 0).write(STEP, own_part(state(1) | own, parts(1)), False)
    pair = ArenaPair(memory, Owner(3, 3, WORLD, WORLD, 0, "own", "run"), memory / "spill")
    Snapshot(pair, STEP, flatten(state(3) | {"random": torch.zeros(7000, dtype=torch.int64)}), POOL).finish()
    (found,) = lost_ranks.lent(memory)
    with BorrowedSource(found) as source:
        back = restore(source, None, POOL)
    assert bool((back["random"] == own["random"]).all())
    assert (back["w"].tensor if isinstance(back["w"], Slab) else back["w"]).tolist() == state(1)["w"].tensor.tolist()


def stage(ranks: tuple[int, ...], value: int) -> dict[str, Any]:
    """A stage of a pipeline whose parameters have the same names and shapes as those of the other stages."""
    return {"w": Slab(np.full(10, value), (20,), (0,), 0, copies=len(ranks), ranks=ranks), "rank": 0}


def test_stages_with_the_same_names_are_of_different_groups(memory: Path) -> None:
    for rank, one in ((0, stage((0, 2), 7)), (2, stage((0, 2), 7)), (1, stage((1, 3), 8)), (3, stage((1, 3), 8))):
        if rank == 1:
            held = parts_held(flatten(one).leaves, own_paths(one))
            assert held is not None
            RecordWriter(memory, 1, WORLD, 0).write(STEP, own_part(one, held), False)
        else:
            pair = ArenaPair(memory, Owner(rank, rank, WORLD, WORLD, 0, "own", "run"), memory / "spill")
            Snapshot(pair, STEP, flatten(one), POOL).finish()
    (found,) = lost_ranks.lent(memory)
    assert found.holder.rank == 3


@pytest.mark.parametrize("holder", [0, 2])
def test_a_script_says_which_ranks_hold_the_same(memory: Path, holder: int) -> None:
    """As with tensor and data parallel ranks: no tensor tells that other ranks have it, too."""

    def plain(rank: int) -> dict[str, Any]:
        return {"w": np.full(100_000, rank % 2), "part": Slab(np.full(4, rank % 2), (8,), (rank % 2 * 4,)), "n": rank}

    group = declared_group([0, 2], 0)
    assert group == declared_group((2, 0), 2) != declared_group([1, 3], 1)
    held = parts_held(flatten(plain(2 - holder)).leaves, own_paths(plain(2 - holder)), group)
    assert held is not None
    RecordWriter(memory, 2 - holder, WORLD, 0).write(STEP, own_part(plain(2 - holder), held), False)
    for rank in (1, 3, holder):
        pair = ArenaPair(memory, Owner(rank, rank, WORLD, WORLD, 0, "own", "run"), memory / "spill")
        its = declared_group([rank, (rank + 2) % 4], rank)
        Snapshot(pair, STEP, flatten(plain(rank)), POOL, group=its).finish()
    (found,) = lost_ranks.lent(memory)
    assert (found.rank, found.holder.rank) == (2 - holder, holder)
    with BorrowedSource(found) as source:
        assert restore(source, None, POOL)["n"] == 2 - holder


@pytest.mark.parametrize(("replicas", "why"), [([1, 2], "other ranks"), (["a"], "numbers"), (3, "numbers")])
def test_what_no_ranks_can_be_is_refused(replicas: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        declared_group(replicas, 0)


def test_one_replica_alone_is_no_group() -> None:
    assert declared_group([0], 0) == ""
