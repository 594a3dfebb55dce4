"""The guess that is made before the first step, against what the state is after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from resilio_hpc.ckpt import Checkpointer, Slab
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.state.expected import expected_bytes
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store.retention import Retention
from tests.support.ckpt.forked_ranks import in_ranks, join
from tests.support.waiting import PATIENCE_S, until

OPTIMIZERS: list[Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    torch.optim.SGD,
    lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    torch.optim.Adagrad,
    torch.optim.RMSprop,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_guess_is_right_to_a_hundredth(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300))
    model[2].weight = model[0].weight  # tied
    optimizer = make(model.parameters())
    state = {"model": model, "optimizer": optimizer, "more": [np.ones(1000), {"x": torch.ones(7)}], "epoch": 3}
    before = expected_bytes(state)
    model(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    after = sum(leaf.size_bytes for leaf in flatten(state).leaves)
    assert before == pytest.approx(after, rel=0.01)
    assert expected_bytes(state) == pytest.approx(after, rel=0.01)


def test_nothing_is_nothing() -> None:
    assert expected_bytes(None) == 0


class InAJob(LocalCoordinator):
    """As if a launcher had started this process: its arenas lie in a directory that it does not own."""

    def __init__(self, directory: Path, arenas: Path) -> None:
        super().__init__(directory, {}, Retention())
        self.arena_directory = arenas


def test_the_first_arena_is_ready_before_the_first_save_and_the_second_before_the_second(tmp_path: Path) -> None:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    coordinator.use(InAJob(tmp_path / "checkpoints", arenas))
    try:
        checkpoint = Checkpointer(tmp_path / "checkpoints")
    finally:
        coordinator.use(None)
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    assert checkpoint.restore(state) is None
    assert wait_for_size(arenas / "rank0.slot0") >= 3 * 500 * 500 * 4
    model(torch.rand(1, 500)).sum().backward()
    optimizer.step()
    checkpoint.save(1, state).wait("committed", 60)
    assert wait_for_size(arenas / "rank0.slot1") >= 3 * 500 * 500 * 4
    assert [held.step for held in arena.scan(arenas)] == [1]


@pytest.mark.parametrize("restored", [False, True])
def test_without_a_launcher_both_are_ready_before_the_first_save(restored: bool, tmp_path: Path) -> None:
    state = {"x": np.ones(3_000_000), "optimizers": [torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])]}
    if restored:
        Checkpointer(tmp_path).save(1, state).wait("committed", 60)
    checkpoint = Checkpointer(tmp_path)
    assert (checkpoint.restore(state) is not None) == restored
    arenas = checkpoint._arenas.pair
    assert arenas is not None
    until(lambda: all(slot.map is not None for slot in arenas._slots), "the arenas are mapped")
    maps = [slot.map for slot in arenas._slots]
    assert all(ready is not None and len(ready) >= 24_000_000 for ready in maps)
    for step in (2, 3):
        checkpoint.save(step, state).wait("committed", 60)
    assert all(slot.map is ready for slot, ready in zip(arenas._slots, maps, strict=True)), "they were made anew"


def test_a_program_that_may_only_restore_takes_no_memory_for_saves(tmp_path: Path) -> None:
    state = {"x": np.ones(3_000_000)}
    Checkpointer(tmp_path).save(1, state).wait("committed", 60)
    checkpoint = Checkpointer(tmp_path)
    assert checkpoint.restore(state) is not None
    assert checkpoint._arenas.pair is None


def test_what_is_never_to_be_in_memory_is_not_made_ready_there(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, memory=False)
    assert checkpoint.restore({"x": np.ones(3_000_000)}) is None
    assert checkpoint._arenas.pair is None


def wait_for_size(path: Path) -> int:
    until(lambda: path.stat().st_size > 0, "the arena has its size")
    return path.stat().st_size


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_memory_of_its_own_is_refused_by_name_and_not_by_the_estimate(tmp_path: Path) -> None:
    def act(rank: int) -> str:
        join(tmp_path, rank, 1)
        part = Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))
        state = {"x": init_from_local_shards([part], 4)}
        checkpoint = Checkpointer(tmp_path / "steps")
        assert checkpoint.restore(state) is None
        checkpoint.save(1, {"x": Slab(torch.ones(4), (4,), (0,))}).wait(timeout_s=PATIENCE_S)
        checkpoint.restore(state)
        return "restored"

    (said,) = in_ranks(act, tmp_path, 1)
    assert said.startswith("UsageError: state['x']: nothing can be restored into it: a ShardedTensor cannot be saved")
