"""Copies beside the forward and backward pass: what waits, who waits for it, and what is never saved torn."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.state.overlap import may_wait, owned
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CheckpointError
from tests.support.waiting import until

WIDTH = 600  # a weight has 1.44 MB


class Training:
    """A small model with an optimizer whose state has all its tensors."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.backward()
        self.optimizer.step()

    @property
    def weight(self) -> torch.Tensor:
        return self.model[0].weight.detach()

    def backward(self) -> None:
        self.model(torch.rand(4, WIDTH)).sum().backward()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


@contextmanager
def copies_held(checkpoint: Checkpointer) -> Iterator[threading.Event]:
    """Every thread that copies waits until the event is set: as on a machine that is much too busy."""
    gate = threading.Event()
    for pool in (checkpoint._pool, checkpoint._copy_pool):
        for _ in range(pool._max_workers):
            pool.submit(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


def test_save_returns_before_the_parameters_are_copied_and_the_next_step_waits(tmp_path: Path) -> None:
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)
    saved = training.weight.clone()
    moment = training.optimizer.state[training.model[0].weight]["exp_avg"].clone()
    stepped = threading.Event()

    def step() -> None:
        training.optimizer.step()
        stepped.set()

    with copies_held(checkpoint) as gate:
        handle = checkpoint.save(1, training.state())
        assert not handle.done("memory")
        training.backward()
        stepping = threading.Thread(target=step)
        stepping.start()
        assert not stepped.wait(0.3)
        assert torch.equal(training.weight, saved)
        gate.set()
        stepping.join(10)
    assert stepped.is_set() and not torch.equal(training.weight, saved)
    handle.wait("committed", 60)
    _, found = Checkpointer(tmp_path).restore()
    assert torch.equal(found["model"]["0.weight"], saved)
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moment)


def test_any_optimizer_s_step_waits_for_every_checkpointer(tmp_path: Path) -> None:
    one, other = Training(), Training()
    checkpoint = Checkpointer(tmp_path, overlap=True)
    with copies_held(checkpoint) as gate:
        handle = checkpoint.save(1, one.state())
        threading.Timer(0.2, gate.set).start()
        other.optimizer.step()
        assert handle.done("memory")


def test_what_the_optimizer_does_not_own_is_copied_at_once(tmp_path: Path) -> None:
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)
    mine = torch.rand(WIDTH, WIDTH)
    statistics = training.model[1].running_mean.clone()
    before = mine.clone()
    handle = checkpoint.save(1, {**training.state(), "mine": mine})
    mine.zero_()
    training.model[1].running_mean.zero_()
    handle.wait("committed", 60)
    _, found = Checkpointer(tmp_path).restore()
    assert torch.equal(found["mine"], before)
    assert torch.equal(found["model"]["1.running_mean"], statistics)


def test_only_large_plain_tensors_of_an_optimizer_wait() -> None:
    training = Training()
    state = flatten({**training.state(), "mine": torch.rand(WIDTH, WIDTH)})
    of_optimizer = owned(state.leaves, state.optimizers)
    waiting = {leaf.path for leaf, its in zip(state.leaves, of_optimizer, strict=True) if its and may_wait(leaf)}
    assert waiting == {
        "model/0.weight",
        "optimizer/state/0/exp_avg",
        "optimizer/state/0/exp_avg_sq",
    }


def test_a_state_dict_of_an_optimizer_is_copied_at_once(tmp_path: Path) -> None:
    """Only the object itself says whose tensors they are."""
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    assert checkpoint.save(1, state).done("memory")


def test_a_view_of_a_larger_tensor_does_not_make_all_of_it_wait() -> None:
    flat = torch.rand(2, WIDTH, WIDTH)
    weight = torch.nn.Parameter(flat[0])
    state = flatten({"flat": flat, "optimizer": torch.optim.SGD([weight])})
    assert owned(state.leaves, state.optimizers) == [False]


def test_a_change_by_something_else_is_seen_and_nothing_torn_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)
    checkpoint.save(1, training.state()).wait("committed", 60)
    with copies_held(checkpoint) as gate:
        handle = checkpoint.save(2, training.state())
        with torch.no_grad():
            training.model[0].weight.clamp_(max=0.0)
        gate.set()
        with pytest.raises(CheckpointError, match=r"model/0\.weight was changed"):
            handle.wait("memory", 10)
    assert "rank 0: step 2 is not saved: model/0.weight was changed" in capfd.readouterr().err
    assert checkpoint.steps() == [1]
    with copies_held(checkpoint) as gate:  # from now on a save is complete when it returns
        threading.Timer(0.2, gate.set).start()
        handle = checkpoint.save(3, training.state())
        assert handle.done("memory")
    with torch.no_grad():
        training.model[0].weight.zero_()
    handle.wait("committed", 60)
    _, found = Checkpointer(tmp_path).restore()
    assert (found["model"]["0.weight"] != 0).any()


def test_the_next_save_a_restore_and_fence_wait(tmp_path: Path) -> None:
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)

    def second_save() -> None:
        checkpoint.save(2, training.state())

    def restored() -> None:
        checkpoint.restore(training.state())

    for step, act in enumerate((checkpoint.fence, second_save, restored), start=10):
        with copies_held(checkpoint) as gate:
            handle = checkpoint.save(step, training.state())
            threading.Timer(0.2, gate.set).start()
            act()
            assert handle.done("memory"), act
        checkpoint.fence()


def test_a_lost_optimizer_and_checkpointer_are_not_waited_for(tmp_path: Path) -> None:
    training, other = Training(), Training()
    checkpoint = Checkpointer(tmp_path, overlap=True)
    checkpoint.save(1, training.state()).wait("committed", 60)
    gone = [weakref.ref(each) for each in (checkpoint, training.model, training.optimizer)]
    del checkpoint, training

    def are_gone() -> bool:
        gc.collect()
        return [each() for each in gone] == [None, None, None]

    until(are_gone, "all three are gone")  # the thread that copied may be in its last line still
    other.optimizer.step()


SCRIPT = """
import sys, torch
from resilio_hpc.ckpt import Checkpointer
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint = Checkpointer(sys.argv[1], overlap=True)
model(torch.rand(1, 3000)).sum().backward()
optimizer.step()
checkpoint.save(1, {"model": model, "optimizer": optimizer})
"""


def test_a_save_just_before_the_end_of_the_script_is_committed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert Checkpointer(tmp_path).steps() == [1]


KILLED = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
weight = torch.nn.Parameter(torch.full((600, 600), 1.0))
optimizer = torch.optim.SGD([weight])
pair = ArenaPair(Path(sys.argv[1]), Owner(0, 0, 1, 1, 0, "own", "run"), Path(sys.argv[1]) / "spill")
with ThreadPoolExecutor(1) as pool:
    Snapshot(pair, 1, flatten({"w": weight, "o": optimizer}), pool, True).finish()
    pool.submit(threading.Event().wait)
    Snapshot(pair, 2, flatten({"w": weight, "o": optimizer}), pool, True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_while_copies_wait_leaves_the_snapshot_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-9, "")
    (held,) = arena.scan(tmp_path)
    assert held.step == 1
    with ArenaSource(held.path) as source, ThreadPoolExecutor(1) as pool:
        assert torch.equal(restore(source, None, pool)["w"], torch.full((600, 600), 1.0))
