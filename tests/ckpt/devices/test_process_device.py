"""A device in another process: killed at any instant, its state is rebuilt to the bit; and the engine saves from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.devices import process_device, registry
from resilio_hpc.ckpt.devices.interface import LOGGED
from resilio_hpc.ckpt.devices.logged_state import LoggedState
from resilio_hpc.ckpt.devices.process_device import KIND, ProcessTensor, device, zeros
from resilio_hpc.ckpt.devices.process_session import DeviceSession
from resilio_hpc.ckpt.devices.registry import DEVICES, GROUP, DeviceRegistry
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, DeviceLost, LayoutMismatch
from tests.support.ckpt.crashing_device import COMMAND

SIDE = 24


@pytest.fixture
def session() -> Iterator[DeviceSession]:
    made = DeviceSession()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    """Leave no device to the next test."""
    yield
    for left in list(device().sessions):
        left.close()
    device().sessions.clear()


class Work:
    """Commands of all kinds on a device, the same for a seed."""

    def __init__(self, session: DeviceSession, seed: int) -> None:
        self.choice = random.Random(seed)
        self.kept = [zeros(session, (SIDE, SIDE)).set_normal(number) for number in range(3)]

    def step(self) -> None:
        one, other = self.choice.sample(self.kept, 2)
        made = zeros(one.session, (SIDE, SIDE)).set_matmul(one, other)
        one.set_sum(other, made.set_scaled(made, 0.02), 0.5)
        other.set_product(other, one)
        other.set_scaled(other, 0.9)
        other.store(torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(self.choice.randrange(99))))

    def contents(self) -> list[torch.Tensor]:
        return [one.fetch() for one in self.kept]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def after(seed: int, steps: int) -> list[torch.Tensor]:
    session = DeviceSession()
    work = Work(session, seed)
    for _ in range(steps):
        work.step()
    found = work.contents()
    session.close()
    return found


@pytest.mark.slow
def test_a_device_that_is_killed_at_any_instant_comes_back_to_the_bit() -> None:
    choice, wanted = random.Random(5), after(7, 60)
    session = DeviceSession(most_commands=150)  # captures, too
    work, step, kills = Work(session, 7), 0, 0
    while step < 60:
        killer = threading.Timer(choice.random() * 0.01, os.kill, (session.pid, signal.SIGKILL))
        if kills < 6 and choice.random() < 0.4:
            kills += 1
            killer.start()
        before, drawn = session.mark(), work.choice.getstate()
        try:
            work.step()
            session.synchronize(30)
        except DeviceLost:
            if killer.ident is not None:
                killer.join()
            session.rebuild(before)  # the step is done again from its beginning
            work.choice.setstate(drawn)
        else:
            step += 1
            if killer.ident is not None:
                killer.join()  # on a busy machine it strikes after the step
                with contextlib.suppress(DeviceLost):
                    while not session.is_lost:  # an answer may still be on its way
                        session.synchronize(30)
                session.rebuild()
    assert kills == 6 and session.rebuilds >= 1 and session.captures >= 1
    assert same(work.contents(), wanted)
    session.close()


def test_a_device_that_is_killed_while_it_is_rebuilt_comes_back(session: DeviceSession) -> None:
    work = Work(session, 3)
    for _ in range(150):
        work.step()
    session.synchronize(60)
    os.kill(session.pid, signal.SIGKILL)
    first, killed = session.pid, []

    def kill_the_next() -> None:
        while session.pid == first:
            time.sleep(0.001)
        while session._link.done_number < 200 and not session.is_lost:
            time.sleep(0.0002)
        killed.append(session.pid)
        os.kill(session.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_next)
    killer.start()
    session.rebuild()
    killer.join()
    if session.is_lost:
        session.rebuild()  # the second one was killed just after its last command
    assert killed and session.pid not in killed
    assert same(work.contents(), after(3, 150))


def test_a_command_that_ends_the_device_each_time_is_named_and_the_state_before_it_can_be_had() -> None:
    session = DeviceSession(command=COMMAND)
    tensor = zeros(session, (4,)).store(torch.arange(4.0))
    before = session.mark()
    session.submit("crash")
    with pytest.raises(DeviceLost):
        session.synchronize(30)
    with pytest.raises(DeviceLost, match=rf"command {before + 1} \(crash\) ends the device each time"):
        session.rebuild()
    session.rebuild(before)
    assert tensor.fetch().tolist() == [0, 1, 2, 3]
    session.close()


def test_a_command_that_the_device_refuses_costs_no_state(session: DeviceSession) -> None:
    tensor = zeros(session, (4,)).store(torch.arange(4.0))
    session.submit("matmul", (tensor.buffer.number,) * 2, (tensor.buffer.number,), (3, 3, 3))
    tensor_after = None
    with pytest.raises(DeviceLost, match=r"cannot do command 3: ValueError"):
        tensor_after = tensor.fetch()
    assert tensor_after is None
    session.rebuild()
    assert tensor.fetch().tolist() == [0, 1, 2, 3]


def test_a_device_that_hangs_is_lost_after_the_limit() -> None:
    session = DeviceSession(command=COMMAND, timeout_s=1.0)
    tensor = zeros(session, (4,)).store(torch.ones(4))
    before = session.mark()
    assert session.synchronize(30)
    session.submit("hang")
    assert not session.synchronize(0.1), "the caller's own limit"
    with pytest.raises(DeviceLost, match="has not answered for 1 s"):
        tensor.fetch()
    session.rebuild(before)
    assert tensor.fetch().tolist() == [1] * 4
    session.close()


def test_what_was_drawn_without_a_seed_comes_back(session: DeviceSession) -> None:
    tensor = zeros(session, (50,)).set_normal()
    drawn = tensor.fetch()
    tensor.set_scaled(tensor, 2.0)
    os.kill(session.pid, signal.SIGKILL)
    with pytest.raises(DeviceLost):
        session.synchronize(30)
        tensor.fetch()
    session.rebuild()
    assert torch.equal(tensor.fetch(), drawn * 2) and drawn.std() > 0.1


# -- the engine ----------------------------------------------------------------------------------------------------


def test_the_engine_saves_and_restores_tensors_of_the_device(session: DeviceSession, tmp_path: Path) -> None:
    large = torch.rand(5_000_000)  # more than a part of a copy
    tensor, small = zeros(session, (5_000_000,)).store(large), zeros(session, (3, 5)).set_normal(1)
    wanted = small.fetch()
    checkpoint = Checkpointer(tmp_path)
    handle = checkpoint.save(4, {"large": tensor, "small": small})
    tensor.set_scaled(tensor, 0.0)  # after the save, in the device's order
    handle.wait("committed", 60)
    found = checkpoint.restore({"large": tensor, "small": small})
    assert found is not None and found[0] == 4 and found[1]["large"] is tensor
    assert torch.equal(tensor.fetch(), large) and torch.equal(small.fetch(), wanted)
    (_, fresh) = Checkpointer(tmp_path).restore() or (0, {})
    assert type(fresh["small"]) is torch.Tensor and torch.equal(fresh["small"], wanted)


def test_a_device_that_is_lost_costs_a_save_and_nothing_else(session: DeviceSession, tmp_path: Path) -> None:
    tensor, checkpoint = zeros(session, (100,)).set_normal(1), Checkpointer(tmp_path)
    os.kill(session.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="cannot be copied from its device"):
        checkpoint.save(1, [tensor]).wait("committed", 60)
    DEVICES.rebuild()
    checkpoint.save(2, [tensor]).wait("committed", 60)
    assert checkpoint.steps() == [2]


def test_a_killed_rank_has_its_own_state_again_by_its_log(tmp_path: Path) -> None:
    first = DeviceSession(tmp_path, "rank0")
    live = zeros(first, (40,)).set_normal(11)
    state = LoggedState(first, {"momentum": live}).state_dict()
    wanted = live.fetch()
    live.set_scaled(live, 3.0)  # of the step that is not finished
    first.synchronize(30)
    first._link.close()  # the rank is gone, and its device with it; the log stays

    second = DeviceSession(tmp_path, "rank0")
    again = zeros(second, (40,))
    logged = LoggedState(second, {"momentum": again})
    foreign = {**state, LOGGED: {"momentum": torch.full((40,), 9.0)}}  # another rank's content
    with pytest.raises(CorruptCheckpoint, match="no log on this node leads to it"):
        logged.load_state_dict({**foreign, "position": 500})
    logged.load_state_dict(foreign)
    assert logged.source == "log" and torch.equal(again.fetch(), wanted)
    again.set_scaled(again, 2.0)
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(DeviceLost):
        again.fetch()
    second.rebuild()
    assert torch.equal(again.fetch(), wanted * 2), "and it goes on with its log"
    logged.load_state_dict({**state, LOGGED: {"momentum": wanted}})
    assert logged.source == "contents" and torch.equal(again.fetch(), wanted)
    second.close()
    assert list(tmp_path.iterdir()) == []


# -- the slot ------------------------------------------------------------------------------------------------------


def entry(value: str) -> EntryPoint:
    return EntryPoint(KIND, value, GROUP)


def test_a_device_is_found_by_the_entry_point_of_its_type(session: DeviceSession) -> None:
    tensor = zeros(session, (4,))
    found = DeviceRegistry(lambda: {KIND: entry(f"{process_device.__name__}:device")})
    assert found.of(torch.ones(1)) is not None and found.place(torch.ones(1)) is None
    assert found.of(tensor) is device() and found.place(tensor) == torch.device(KIND, 0)
    assert DeviceRegistry(lambda: {}).place(tensor) is None


@pytest.mark.parametrize(
    ("value", "why"),
    [("no_such_module:device", "ModuleNotFoundError"), (f"{registry.__name__}:object", "AttributeError"),
     ("builtins:dict", "it lacks beside, boundary")],
)  # fmt: skip
def test_a_device_that_cannot_be_used_is_told_once(
    value: str, why: str, session: DeviceSession, capfd: pytest.CaptureFixture[str]
) -> None:
    tensor, found = zeros(session, (4,)), DeviceRegistry(lambda: {KIND: entry(value)})
    assert found.place(tensor) is None and found.place(tensor) is None
    said = capfd.readouterr().err
    assert said.count("cannot be used") == 1 and why in said


def test_generators_of_a_device_that_is_not_here_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="generators of a device 'npu' were saved"):
        DeviceRegistry(lambda: {}).set_rng_states({"npu": b""})


def contract_tensors() -> list[str]:
    return ["cpu", KIND]


@pytest.mark.parametrize("kind", contract_tensors())
def test_what_each_device_has_to_do(kind: str, session: DeviceSession) -> None:
    """The contract; on a machine with a GPU, tests/ckpt/test_cuda.py has CUDA's."""
    content = torch.rand(6, 7)
    tensor = torch.empty(6, 7) if kind == "cpu" else zeros(session, (6, 7))
    one = DEVICES.of(tensor)
    assert one is not None and one.kind == kind
    where = one.place(tensor)
    assert where is not None and one.place(torch.empty(1, device="meta")) is None
    one.copy_in(tensor, content)
    room = bytearray(tensor.nbytes)
    with one.beside({where: one.boundary(where)}):
        one.follow(where)
        one.copy(tensor, memoryview(room))
        mark = one.mark(where)
    one.hold(where, mark)
    one.copy_in(tensor, torch.zeros(6, 7))
    mark.wait()
    assert bytes(room) == content.numpy().tobytes(), "a later change comes after the copy"
    assert one.synchronize(where, 30)
    one.set_rng_state(one.rng_state())
    assert not one.loses_state(RuntimeError("some mistake"))
    one.rebuild()
    assert isinstance(tensor, ProcessTensor) == (kind == KIND)
