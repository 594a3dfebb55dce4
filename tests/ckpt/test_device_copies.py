"""Snapshots of tensors on a device, with a stand-in for CUDA whose copies run as late as they may (fake_device)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot.device_copy import parts
from resilio_hpc.ckpt.state import overlap
from resilio_hpc.core.errors import CheckpointError
from tests.ckpt.test_overlap import WIDTH, Training, copies_held
from tests.support.ckpt.fake_device import FakeDevice


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def checkpointer(directory: Path, device: FakeDevice, overlap: bool = True) -> Checkpointer:
    made = Checkpointer(directory, overlap=overlap)
    made._arenas.device = device
    return made


def on_device(training: Training, device: FakeDevice) -> Training:
    device.put(*training.model.parameters(), *training.model.buffers())
    device.put(*[value for state in training.optimizer.state.values() for value in state.values()])
    return training


def saved_values(training: Training) -> list[torch.Tensor]:
    model, state = training.model.state_dict(), training.optimizer.state_dict()["state"]
    return [value.clone() for value in (*model.values(), *[v for one in state.values() for v in one.values()])]


def restored_values(directory: Path) -> list[torch.Tensor]:
    found = Checkpointer(directory).restore()
    assert found is not None
    model, optimizer = found[1]["model"], found[1]["optimizer"]
    return [*model.values(), *[v for one in optimizer["state"].values() for v in one.values()]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_neither_save_nor_the_next_step_wait_on_the_host_and_the_step_comes_after_the_copies(
    device: FakeDevice, tmp_path: Path
) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    before = saved_values(training)
    with copies_held(checkpoint):
        handle = checkpoint.save(1, training.state())
        training.backward()  # the running mean of BatchNorm changes here
        training.optimizer.step()
        assert not handle.done("memory"), "its checksums are to be computed yet"
    handle.wait("committed", 60)
    assert not same(saved_values(training), before)
    assert same(restored_values(tmp_path), before)


def test_without_overlap_a_snapshot_is_complete_on_return(device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device, overlap=False)
    before = saved_values(training)
    handle = checkpoint.save(1, training.state())
    assert handle.done("memory")
    for value in training.model.parameters():
        value.detach().zero_()
    handle.wait("committed", 60)
    assert same(restored_values(tmp_path), before)


def test_where_the_host_copies_too_the_step_waits_for_it(device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = Training(), checkpointer(tmp_path, device)
    moments = [value for state in training.optimizer.state.values() for value in state.values()]
    device.put(*moments)  # and the parameters are on the CPU
    before = saved_values(training)
    handle = checkpoint.save(1, training.state())
    training.optimizer.step()
    assert handle.done("memory")
    handle.wait("committed", 60)
    assert same(restored_values(tmp_path), before)


@pytest.mark.parametrize("then_steps", [False, True])
def test_a_change_by_something_else_is_seen(then_steps: bool, device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    with copies_held(checkpoint):
        handle = checkpoint.save(1, training.state())
        training.weight.add_(1)
        if then_steps:
            training.optimizer.step()
    with pytest.raises(CheckpointError, match=r"model/0\.weight was changed, by something else"):
        handle.wait("committed", 60)
    assert checkpoint.save(2, training.state()).done("memory"), "from then on without overlap"


def test_steps_after_the_first_one_are_no_change_by_something_else(device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    before = saved_values(training)
    with copies_held(checkpoint):
        handle = checkpoint.save(1, training.state())
        for _ in range(3):
            training.optimizer.step()
    handle.wait("committed", 60)
    assert same(restored_values(tmp_path), before)


def test_the_next_save_waits_for_the_one_before(device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    for step in (1, 2, 3):
        before = saved_values(training)
        handle = checkpoint.save(step, training.state())
        training.backward()
        training.optimizer.step()
    handle.wait("committed", 60)
    assert same(restored_values(tmp_path), before)


def odd_tensors() -> Iterator[torch.Tensor]:
    torch.manual_seed(4)
    yield torch.rand(2500, 2600).t()  # 26 MB, not contiguous
    yield torch.rand(9_000_000)[::2]
    yield torch.rand(40, 40, dtype=torch.complex64).conj()
    yield torch.rand(3, 5).to(torch.bfloat16)
    yield torch.rand(6_000_001)
    yield torch.tensor(7.0)
    yield torch.empty(0, 3)


def test_odd_tensors_are_saved_bit_for_bit_in_little_memory_of_the_device(device: FakeDevice, tmp_path: Path) -> None:
    tensors = list(odd_tensors())
    device.put(*tensors)
    checkpointer(tmp_path, device, overlap=False).save(1, tensors).wait("committed", 60)
    found = Checkpointer(tmp_path).restore()
    assert found is not None
    assert same(found[1], tensors)
    assert device.largest_strided <= 16 << 20


def test_parts_are_the_whole_in_row_major_order() -> None:
    for value in odd_tensors():
        small = list(parts(value, 100_000))
        assert all(part.nbytes <= 100_000 for part in small)
        flat = torch.cat([part.reshape(-1) for part in small]) if small else value.reshape(-1)
        assert torch.equal(flat, value.reshape(-1))


def test_a_device_that_fails_costs_a_save_and_nothing_else(
    device: FakeDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    device.fails_at = 3
    handle = checkpoint.save(1, training.state())
    with pytest.raises(CheckpointError, match="cannot be copied from its device: CUDA error: out of memory"):
        handle.wait("committed", 1)
    assert "step 1 is not saved" in capfd.readouterr().err
    device.fails_at = -1
    before = saved_values(training)
    checkpoint.save(2, training.state()).wait("committed", 60)
    assert same(restored_values(tmp_path), before)


def test_memory_is_locked_once_and_unlocked_before_it_goes(device: FakeDevice, tmp_path: Path) -> None:
    checkpoint = checkpointer(tmp_path, device, overlap=False)
    values: list[Any] = [torch.rand(100_000), torch.rand(30_000_000)]
    device.put(*values)
    for step, value in enumerate((values[0], values[0], values[0], values[1], values[1], values[1])):
        checkpoint.save(step, [value]).wait("committed", 60)
    assert len(device.locked) == 2 and min(size for _, size in device.locked) > 120_000_000
    checkpoint._arenas.open().close()
    assert device.locked == []


def test_memory_that_cannot_be_locked_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    device = FakeDevice(locks=False)
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device, overlap=False)
    for step in (1, 2):
        checkpoint.save(step, training.state()).wait("committed", 60)
    assert capfd.readouterr().err.count("no pages are locked here: copies from the device take longer") == 1
    assert WIDTH in restored_values(tmp_path)[0].shape


def test_the_last_step_is_copied_beside_a_collective_that_never_ends(device: FakeDevice, tmp_path: Path) -> None:
    training, checkpoint = on_device(Training(), device), checkpointer(tmp_path, device)
    saver = checkpoint.saver(training.state)
    saver.hold(1)
    before = saved_values(training)
    training.backward()  # its running statistics change, of which the boundary has copies
    device.is_stuck = True
    assert saver.save_held() == 1
    pair = checkpoint._arenas.pair
    assert pair is not None
    path = pair.held(1)
    assert path is not None
    with ArenaSource(path) as source:
        found = restore(source, None, checkpoint._pool)
    model, optimizer = found["model"], found["optimizer"]
    values = [*model.values(), *[v for one in optimizer["state"].values() for v in one.values()]]
    assert same(before, values)
    overlap._fenced.discard(saver)
