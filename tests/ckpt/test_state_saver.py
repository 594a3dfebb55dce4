"""What is saved when ranks cannot go on: the last finished step, whatever the training thread does meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.boundary_record import read_records, record_path
from resilio_hpc.ckpt.state import overlap
from resilio_hpc.ckpt.state.held_state import NotHeld
from resilio_hpc.ckpt.state_saver import IN_STEP_S, StateSaver
from resilio_hpc.core.tiers import Stage, Tier
from tests.support.ckpt.recording_coordinator import RecordingCoordinator
from tests.support.waiting import PATIENCE_S


class Rank:
    """A rank that trains a small model."""

    def __init__(self, path: Path) -> None:
        self.arenas = path / "arenas"
        self.arenas.mkdir()
        self.launcher = RecordingCoordinator(self.arenas, Place(0, 0, 4, 2, 5, "run"))
        coordinator.use(self.launcher)
        self.checkpoint = Checkpointer(path / "checkpoints", layout=REPLICATED)
        torch.manual_seed(3)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.more: dict[str, Any] = {}
        self.saver: StateSaver = self.checkpoint.saver(self.state)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "rng": rng_state(), **self.more}

    def work(self) -> None:
        self.model(torch.rand(2, 3)).sum().backward()

    def saved(self, step: int) -> Any:
        (path,) = [one.path for one in arena.scan(self.arenas) if one.step == step]
        with ArenaSource(path) as source:
            return restore(source, None, self.checkpoint._pool)

    def weight(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()

    def records(self) -> list[tuple[int, bool]]:
        return [(one.step, one.is_early) for one in read_records(record_path(self.arenas, 0))]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    coordinator.use(None)
    overlap._fenced.discard(made.saver)


def test_in_the_midst_of_a_step_the_one_before_is_saved(rank: Rank) -> None:
    rank.saver.hold(4)
    before, drawn = rank.weight(), rank.state()["rng"]
    rank.work()
    assert rank.saver.save_held() == 4
    found = rank.saved(4)
    assert found["model"]["weight"].flatten().tolist() == before
    assert found["rng"] == drawn != rank.state()["rng"]
    assert rank.launcher.taken == []  # the rank's link tells the agent, and not as of a save
    rank.optimizer.step()
    rank.saver.hold(5)
    rank.saver(5)
    assert rank.launcher.taken == [5]


def test_a_rank_inside_of_its_optimizers_step_is_waited_for(rank: Rank) -> None:
    rank.saver.hold(4)
    rank.work()
    inside, go_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)

    rank.optimizer.register_step_post_hook(pause)
    trainer = threading.Thread(target=lambda: (rank.optimizer.step(), rank.saver.hold(5)))
    rank.saver._trainer = -1
    trainer.start()
    assert inside.wait(PATIENCE_S)
    found: list[int] = []
    salvage = threading.Thread(target=lambda: found.append(rank.saver.save_held()))
    salvage.start()
    go_on.set()
    trainer.join()
    salvage.join()
    assert found == [5]
    assert rank.saved(5)["model"]["weight"].flatten().tolist() == rank.weight()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_follows_an_optimizers_step_is_waited_for_as_long_as_a_step_takes(rank: Rank, is_given_up: bool) -> None:
    for step in (3, 4):
        rank.saver.hold(step)
    rank.saver._step_s = 2 * PATIENCE_S  # as it takes at most: much longer than the shortest wait
    rank.work()
    rank.optimizer.step()
    rank.saver._trainer = -1
    found: list[int | NotHeld] = []

    def save() -> None:
        try:
            found.append(rank.saver.save_held())
        except NotHeld as error:
            found.append(error)

    salvage = threading.Thread(target=save)
    salvage.start()
    if is_given_up:
        rank.saver.give_up_step()
    else:
        time.sleep(1.5 * IN_STEP_S)
        assert found == []
        rank.saver.hold(5)
    salvage.join()
    assert isinstance(found[0], NotHeld) if is_given_up else found == [5]


def test_the_training_thread_does_not_wait_for_itself(rank: Rank) -> None:
    rank.saver.hold(4)
    rank.work()
    rank.optimizer.step()
    with pytest.raises(NotHeld, match="an optimizer's step had begun"):
        rank.saver.save_held()


def test_an_optimizer_waits_for_a_snapshot_that_is_being_taken(rank: Rank) -> None:
    rank.saver.hold(4)
    before = rank.weight()
    rank.work()
    gate, arrived = threading.Event(), threading.Event()
    take = rank.checkpoint.save_held

    def slowly(held: Any) -> None:
        arrived.set()
        assert gate.wait(PATIENCE_S)
        take(held)

    rank.checkpoint.save_held = slowly  # type: ignore[method-assign]
    salvage = threading.Thread(target=rank.saver.save_held)
    salvage.start()
    assert arrived.wait(PATIENCE_S)
    stepped = threading.Event()
    trainer = threading.Thread(target=lambda: (rank.optimizer.step(), stepped.set()))
    trainer.start()
    assert not stepped.wait(0.1)
    gate.set()
    for thread in (salvage, trainer):
        thread.join(PATIENCE_S)
    assert rank.saved(4)["model"]["weight"].flatten().tolist() == before != rank.weight()


def test_records_are_left_at_the_boundary_and_before_the_optimizers_step(rank: Rank) -> None:
    rank.saver.hold(4)
    assert rank.records() == [(4, False)]
    rank.work()
    rank.optimizer.step()
    assert rank.records() == [(4, False), (5, True)]
    rank.saver.hold(5)
    assert rank.records() == [(4, False), (5, True), (5, False)]


def test_records_before_the_optimizers_step_end_where_more_happens_after_it(rank: Rank) -> None:
    for step in (4, 5, 6):
        rank.saver.hold(step)
        rank.work()
        rank.optimizer.step()
        torch.rand(1)  # drawn behind the optimizer's step
    rank.saver.hold(7)
    assert [step for step, early in rank.records() if early] == [5]  # seen with the next boundary, and no more since


def test_schedules_and_scalers_are_the_same_on_all_ranks(rank: Rank) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(rank.optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rank.more.update(schedule=schedule, scaler=scaler)
    for step in (4, 5):
        rank.saver.hold(step)
        rank.work()
        rank.optimizer.step()
        schedule.step()  # behind the optimizer's step, as is usual
    rank.saver.hold(6)
    assert [step for step, early in rank.records() if early] == [6]
    rate = schedule.last_epoch
    schedule.step()
    assert rank.saver.save_held() == 6
    found = rank.saved(6)
    assert (found["schedule"]["last_epoch"], found["scaler"]["scale"]) == (rate, 8.0)


def test_a_state_that_fails_in_the_midst_of_a_step_does_not_end_training(rank: Rank) -> None:
    rank.saver.hold(4)
    rank.work()
    state = rank.saver._state
    rank.saver._state = lambda: 1 / 0
    rank.optimizer.step()
    rank.saver._state = state
    rank.saver.hold(5)
    assert rank.saver.save_held() == 5


def test_what_cannot_be_held_is_told_once_and_training_goes_on(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    rank.more["grid"] = np.zeros(5_000_000)
    rank.saver.hold(4)
    rank.saver.hold(5)
    assert capsys.readouterr().err.count("a failure will cost the steps since the last save: grid") == 1
    with pytest.raises(NotHeld, match="array of numpy"):
        rank.saver.save_held()
    rank.more.clear()
    rank.saver.hold(6)
    assert rank.saver.save_held() == 6


def test_a_state_without_torchs_objects_is_held_by_copies(rank: Rank) -> None:
    state = {"grid": np.arange(4.0), "seen": [1]}
    saver = rank.checkpoint.saver(state)
    saver.hold(4)
    state["grid"] += 1
    state["seen"].append(2)
    assert saver.save_held() == 4
    found = rank.saved(4)
    assert (found["grid"].tolist(), found["seen"]) == ([0.0, 1.0, 2.0, 3.0], [1])


def test_snapshots_that_other_ranks_may_need_stay(rank: Rank) -> None:
    for step in (2, 3):
        rank.saver(step)
    rank.saver.hold(4)
    pins = [arena.lock_snapshot(held) for held in arena.scan(rank.arenas)]  # as while they are written to disk
    assert rank.saver.save_held() == 4
    assert [one.step for one in arena.scan(rank.arenas)] == [2, 3, 4]
    assert rank.saver.save_held() == 4
    for pin in pins:
        assert pin is not None
        os.close(pin)
    rank.saver(6)
    assert [one.step for one in arena.scan(rank.arenas)] == [3, 4, 6]
    rank.saver(8)
    assert [one.step for one in arena.scan(rank.arenas)] == [6, 8]
    assert not arena.slot_path(rank.arenas, 0, arena.LAST).exists()


@pytest.mark.parametrize(("committed", "kept"), [(3, [3, 4]), (2, [2, 3, 4]), (-1, [2, 3, 4])])
def test_what_is_older_than_a_committed_snapshot_gives_its_memory_to_the_last_step(
    rank: Rank, committed: int, kept: list[int]
) -> None:
    for step in (2, 3):
        rank.saver(step)
    rank.launcher.reached(committed, Stage.COMMITTED)
    rank.saver.hold(4)
    assert rank.saver.save_held() == 4
    assert [one.step for one in arena.scan(rank.arenas)] == kept
    assert arena.slot_path(rank.arenas, 0, arena.LAST).exists() == (len(kept) == 3)


def test_a_commit_of_a_life_that_was_rolled_back_frees_no_snapshot_of_the_next(rank: Rank) -> None:
    rank.launcher.reached(9, Stage.COMMITTED)
    rank.checkpoint.restore(rank.state())  # there is nothing to restore: it begins again
    for step in (2, 3):
        rank.saver(step)
    rank.saver.hold(4)
    assert rank.saver.save_held() == 4
    assert [one.step for one in arena.scan(rank.arenas)] == [2, 3, 4]


def test_while_the_last_one_is_written_to_disk_the_next_failure_loses_nothing(rank: Rank) -> None:
    for step in (2, 3):
        rank.saver(step)
    rank.saver.hold(4)
    assert rank.saver.save_held() == 4
    (last,) = [held for held in arena.scan(rank.arenas) if held.step == 4]
    pin = arena.lock_snapshot(last)
    rank.saver.hold(5)
    assert rank.saver.save_held() == 5
    assert [one.step for one in arena.scan(rank.arenas)] == [3, 4, 5], "all ranks went on from 4: the oldest one went"
    assert pin is not None
    os.close(pin)


def test_an_empty_slot_takes_the_last_step_before_a_third_one_is_made(rank: Rank) -> None:
    rank.saver(2)
    rank.saver.hold(4)
    assert rank.saver.save_held() == 4
    assert [one.step for one in arena.scan(rank.arenas)] == [2, 4]
    assert not arena.slot_path(rank.arenas, 0, arena.LAST).exists()


def test_a_step_that_was_saved_is_not_saved_again(rank: Rank) -> None:
    rank.saver.hold(4)
    rank.saver(4)
    assert rank.saver.save_held() == 4
    assert not arena.slot_path(rank.arenas, 0, arena.LAST).exists()


def test_a_module_is_a_state_and_no_function(rank: Rank) -> None:
    assert rank.checkpoint.saver(rank.model)._state() is rank.model


def test_without_room_for_records_training_goes_on(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def write(self, step: int, part: bytes, is_early: bool) -> None:
            raise OSError(28, "No space left on device")

    rank.saver.hold(4)
    rank.saver._records = Full()  # type: ignore[assignment]
    rank.work()
    rank.optimizer.step()
    rank.saver.hold(5)
    assert "No space left on device" in capsys.readouterr().err
    assert rank.saver.save_held() == 5


def test_after_the_first_gradient_what_the_next_boundary_has_is_left_behind(rank: Rank) -> None:
    rank.saver.hold(4)
    rank.work()
    assert rank.records() == [(4, False)], "at first it is only compared"
    rank.optimizer.step()
    rank.saver.hold(5)
    rank.work()
    assert (6, True) in rank.records()
    (early,) = [one for one in read_records(record_path(rank.arenas, 0)) if one.is_early]
    rank.optimizer.step()
    rank.saver.hold(6)
    (held,) = [one for one in read_records(record_path(rank.arenas, 0)) if (one.step, one.is_early) == (6, False)]
    assert early.part == held.part


def test_a_step_that_draws_after_its_first_gradient_is_recorded_before_the_optimizers(rank: Rank) -> None:
    for step in range(4, 7):
        rank.saver.hold(step)
        rank.work()
        rank.work()  # gradients are accumulated: the second half draws again
        assert (step + 1, True) not in rank.records()
        rank.optimizer.step()
        assert (step + 1, True) in rank.records()
    assert rank.saver._trusts_gradient is False


def test_the_step_that_a_round_began_with_keeps_its_snapshot(rank: Rank) -> None:
    """Ranks that have not come as far need the tensors of that one, and have no record of this round."""
    rank.saver.hold(4)
    assert rank.saver.save_held() == 4
    (before,) = arena.scan(rank.arenas)
    rank.launcher.place = replace(rank.launcher.place, round=6)
    rank.launcher.restores(RestorePoint(Tier.MEMORY, 4))
    assert rank.checkpoint.restore(rank.state()) is not None
    saver = rank.checkpoint.saver(rank.state)
    saver.hold(4)
    assert saver.save_held() == 4
    assert arena.scan(rank.arenas) == [before]
    rank.work()
    rank.optimizer.step()
    saver.hold(5)
    assert saver.save_held() == 5
    assert [(one.step, one.round) for one in arena.scan(rank.arenas)] == [(4, 5), (5, 6)]


def test_the_optimizers_first_step_makes_parts_and_records_go_on_being_made_before_it(rank: Rank) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        rank.model.register_parameter("part", torch.nn.Parameter(whole))
        rank.optimizer.add_param_group({"params": [rank.model.part]})
        rank.checkpoint.layout = "own"
        saver = rank.checkpoint.saver(rank.state, replicas=[0, 2])
        for step in (0, 1, 2):
            saver.hold(step)
            rank.work()
            rank.model.part.grad = whole.clone()  # type: ignore[union-attr]
            rank.optimizer.step()
        assert (3, True) in rank.records()
    finally:
        dist.destroy_process_group()
        overlap._fenced.discard(saver)
