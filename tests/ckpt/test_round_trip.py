"""Save and restore of real training states through a Checkpointer, bit by bit, without a launcher."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from resilio_hpc import ckpt
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, LayoutMismatch, UsageError
from tests.support.ckpt.any_state import same


@pytest.fixture
def checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ckpt.Checkpointer:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RESILIO_AGENT_SOCKET", "RESILIO_ROUND"):
        monkeypatch.delenv(name, raising=False)
    return ckpt.Checkpointer(tmp_path / "checkpoints")


class Training:
    """A small AdamW run with dropout, batch norm and a schedule, whose every step depends on all of its state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 17), torch.nn.BatchNorm1d(17), torch.nn.Dropout(0.2), torch.nn.Linear(17, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4]),
            ],
            milestones=[3],
        )
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            noise = torch.randn(8, 6) + random.random() + float(np.random.random())
            self.optimizer.zero_grad()
            loss = self.model(noise).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.plateau.step(loss.item())
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "plateau": self.plateau,
            "rng": ckpt.rng_state(),
        }


def test_training_goes_on_bit_by_bit_after_a_restore(checkpointer: ckpt.Checkpointer) -> None:
    first = Training(1)
    first.steps(5)
    checkpointer.save(5, first.state()).wait(timeout_s=30)
    expected = first.steps(6)

    second = Training(2)
    random.seed(0)
    np.random.seed(0)
    weight = second.model[0].weight
    found = checkpointer.restore(second.state())
    assert found is not None
    step, state = found
    ckpt.set_rng_state(state["rng"])
    assert step == 5
    assert second.model[0].weight is weight
    assert second.steps(6) == expected
    for left, right in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


ODD_TENSORS = {
    "bfloat16": torch.randn(5, 3).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "conjugate": torch.randn(3, 2, dtype=torch.complex128).conj(),
    "int64 scalar": torch.tensor(-(1 << 62)),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "a/b%c d": torch.ones(1),
}


DTYPES = sorted({str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)})
DTYPES = [name for name in DTYPES if not name.startswith(("torch.qint", "torch.quint"))]  # of quantised tensors only


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch_comes_back_bit_by_bit(name: str, checkpointer: ckpt.Checkpointer) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    raw = torch.arange(48, dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw  # no other bytes are a bool
    checkpointer.save(1, {"x": raw.view(dtype)}).wait(timeout_s=30)
    live = torch.zeros(48, dtype=torch.uint8)
    for found in (checkpointer.restore(), checkpointer.restore({"x": live.view(dtype)})):
        assert found is not None
        assert found[1]["x"].dtype == dtype
        assert torch.equal(found[1]["x"].view(torch.uint8), raw)
    assert torch.equal(live, raw)


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_odd_torch_tensors_come_back_bit_by_bit(name: str, checkpointer: ckpt.Checkpointer) -> None:
    value = ODD_TENSORS[name]
    checkpointer.save(1, {name: value, "more": [value]}).wait(timeout_s=30)
    found = checkpointer.restore()
    assert found is not None
    fresh = found[1][name]
    assert (fresh.dtype, fresh.shape) == (value.dtype, value.shape)
    assert bits(fresh) == bits(value)
    if name != "expanded":
        live = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        live.view(-1).fill_(0) if live.is_contiguous() else None
        assert checkpointer.restore({name: live}) is not None
        assert bits(live) == bits(value)


def bits(value: torch.Tensor) -> bytes:
    plain = value.resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10, dtype=">i4")[::2],
        np.array(3, dtype=np.uint16),
        np.zeros((0, 3), dtype=np.float16),
        np.array(["ä", "bc"]),
        np.array([b"x", b"yz"]),
        np.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
        np.array([1 + 2j]),
        np.array([1, 2], dtype=np.longdouble),
        np.array([True, False]),
    ],
    ids=lambda value: str(value.dtype),
)
def test_numpy_arrays_come_back_bit_by_bit(value: np.ndarray[Any, Any], checkpointer: ckpt.Checkpointer) -> None:
    checkpointer.save(1, value).wait(timeout_s=30)
    found = checkpointer.restore()
    assert found is not None
    assert found[1].dtype == value.dtype
    assert found[1].shape == value.shape
    assert found[1].tobytes() == value.tobytes()
    live = np.empty_like(value)
    assert checkpointer.restore(live) is not None
    assert live.tobytes() == value.tobytes()


def test_tied_weights_stay_tied_in_a_fresh_state(checkpointer: ckpt.Checkpointer) -> None:
    weight = torch.randn(4)
    checkpointer.save(1, {"a": weight, "b": weight}).wait(timeout_s=30)
    found = checkpointer.restore()
    assert found is not None
    assert found[1]["a"] is found[1]["b"]
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    checkpointer.restore(live)
    assert torch.equal(live["a"], weight)
    assert torch.equal(live["b"], weight)


def test_two_views_of_one_storage_both_come_back(checkpointer: ckpt.Checkpointer) -> None:
    base = torch.arange(10.0)
    checkpointer.save(1, {"head": base[:4], "tail": base[2:]}).wait(timeout_s=30)
    base2 = torch.zeros(10)
    checkpointer.restore({"head": base2[:4], "tail": base2[2:]})
    assert torch.equal(base2, base)


def test_containers_of_the_state_are_filled_in_place(checkpointer: ckpt.Checkpointer) -> None:
    checkpointer.save(3, {"n": 7, "list": [torch.ones(2), 5], "pair": (torch.ones(1), "x"), 0: {"new": 1}}).wait()
    inner: list[Any] = [torch.zeros(2), 0]
    state = {"n": 0, "list": inner, "pair": (torch.zeros(1), ""), 0: {}}
    found = checkpointer.restore(state)
    assert found is not None
    assert found[1] is state
    assert state["n"] == 7
    assert state["list"] is inner
    assert inner[1] == 5
    assert torch.equal(inner[0], torch.ones(2))
    assert state["pair"] == (torch.ones(1), "x")
    assert state[0] == {"new": 1}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.zeros(3)}, r"state\['w'\].*shape \[2\].*\[3\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, r"state\['w'\].*float32.*float64"),
        ({"w": np.zeros(2, dtype=np.float32)}, r"state\['w'\].*torch.*numpy"),
        ({"w": torch.zeros(2), "x": 1}, r"state\['x'\].*the checkpoint does not"),
        ({"n": torch.zeros(2)}, r"state\['n'\].*the checkpoint a int"),
        ({"w": [torch.zeros(2)]}, r"state\['w'\].*holds a tensor"),
        ({"m": torch.nn.Linear(2, 2)}, r"state\['m'\].*only in the module: \['weight', 'bias'\]"),
        ({"l": [torch.zeros(1)]}, r"state\['l'\].*list of 2"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    state: dict[str, Any], message: str, checkpointer: ckpt.Checkpointer
) -> None:
    saved = {"a": torch.ones(2), "w": torch.ones(2), "n": 5, "m": {"other": 1}, "l": [1, 2]}
    checkpointer.save(1, saved).wait(timeout_s=30)
    witness = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match=message):
        checkpointer.restore({"a": witness, **state})
    assert torch.equal(witness, torch.zeros(2))


def test_the_shard_is_an_hdf5_file_that_others_can_read(checkpointer: ckpt.Checkpointer) -> None:
    weight = torch.randn(300, 100)
    checkpointer.save(2, {"model": {"layers.0.weight": weight}, "half": weight.bfloat16()}).wait(timeout_s=30)
    with h5py.File(checkpointer.directory / "step-0000000002" / "node-0.h5") as file:
        dataset = file["rank0/model/layers.0.weight"]
        assert np.array_equal(dataset[:], weight.numpy())
        assert dataset.id.get_offset() % 4096 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_other_programs_read_small_floats_as_numbers(dtype: torch.dtype, checkpointer: ckpt.Checkpointer) -> None:
    """Each value of bfloat16 that there is, and what every float must get right."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    every = patterns.view(dtype) if dtype == torch.bfloat16 else patterns[:256].to(torch.uint8).view(dtype)
    checkpointer.save(2, {"x": every}).wait(timeout_s=30)
    with h5py.File(checkpointer.directory / "step-0000000002" / "node-0.h5") as file:
        dataset = file["rank0/x"]
        assert dataset.attrs["dtype"] == str(dtype).removeprefix("torch.")
        assert dataset.shape == every.shape
        assert dataset.dtype.kind == "f"
        assert np.array_equal(dataset[:].astype(np.float32), every.float().numpy(), equal_nan=True)


def test_a_dtype_that_hdf5_lacks_is_bytes_and_named(checkpointer: ckpt.Checkpointer) -> None:
    value = torch.randn(6, 2).to(torch.float8_e4m3fn)
    checkpointer.save(2, {"x": value}).wait(timeout_s=30)
    with h5py.File(checkpointer.directory / "step-0000000002" / "node-0.h5") as file:
        assert file["rank0/x"].attrs["dtype"] == "float8_e4m3fn"
        assert np.array_equal(file["rank0/x"][:, :, 0], value.view(torch.uint8).numpy())


def test_a_small_state_may_be_nothing_but_plain_values(checkpointer: ckpt.Checkpointer) -> None:
    checkpointer.save(0, None).wait(timeout_s=30)
    assert checkpointer.restore() == (0, None)
    assert checkpointer.steps() == [0]


def test_without_a_checkpoint_there_is_nothing_to_restore(checkpointer: ckpt.Checkpointer) -> None:
    assert checkpointer.restore({"a": torch.ones(1)}) is None
    with pytest.raises(CorruptCheckpoint, match="step 7 is not in"):
        checkpointer.restore(step=7)


def test_an_earlier_step_can_be_asked_for_and_training_goes_on_from_it(checkpointer: ckpt.Checkpointer) -> None:
    for step in (10, 20, 30):
        checkpointer.save(step, {"step": step}).wait(timeout_s=30)
    assert checkpointer.restore(step=10) == (10, {"step": 10})
    checkpointer.save(15, {"step": 15}).wait(timeout_s=30)
    assert checkpointer.steps() == [20, 30, 15]  # in the order of the commits: 10 was pruned
    assert checkpointer.restore() == (15, {"step": 15})


def test_changing_shapes_are_saved_right(checkpointer: ckpt.Checkpointer) -> None:
    for step, size in enumerate([10, 3_000_000, 5, 0, 40_000_000, 7]):
        value = torch.arange(size, dtype=torch.int32)
        checkpointer.save(step, {"x": value}).wait(timeout_s=60)
        found = checkpointer.restore()
        assert found is not None
        assert torch.equal(found[1]["x"], value)


def test_no_memory_stage_is_possible(tmp_path: Path) -> None:
    saver = ckpt.Checkpointer(tmp_path / "c", local=tmp_path / "node", memory=False)
    saver.save(4, {"x": torch.ones(3)}).wait(timeout_s=30)
    assert torch.equal(ckpt.Checkpointer(tmp_path / "c").restore()[1]["x"], torch.ones(3))  # type: ignore[index]


def test_a_save_that_the_disk_refuses_does_not_raise_but_its_wait_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    saver = ckpt.Checkpointer(tmp_path / "file" / "checkpoints")
    handle = saver.save(1, {"x": torch.ones(3)})
    handle.wait("memory")
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        handle.wait(timeout_s=30)


def test_a_wait_has_an_end() -> None:
    handle = ckpt.SaveHandle(3)
    with pytest.raises(TimeoutError, match="step 3 is not committed after"):
        handle.wait(timeout_s=0.01)


def test_mistakes_in_arguments_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIO_CHECKPOINT_DIR", raising=False)
    with pytest.raises(UsageError, match="RESILIO_CHECKPOINT_DIR"):
        ckpt.Checkpointer()
    with pytest.raises(UsageError, match="REPLICATED"):
        ckpt.Checkpointer(tmp_path, layout="sharded")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="step -1"):
        ckpt.Checkpointer(tmp_path).save(-1, {})


def test_generators_are_restored(checkpointer: ckpt.Checkpointer) -> None:
    state = copy.deepcopy(ckpt.rng_state())
    expected = (random.random(), float(np.random.normal()), torch.rand(3))
    checkpointer.save(1, state).wait(timeout_s=30)
    found = checkpointer.restore()
    assert found is not None
    ckpt.set_rng_state(found[1])
    assert random.random() == expected[0]
    assert float(np.random.normal()) == expected[1]
    assert torch.equal(torch.rand(3), expected[2])


def test_a_list_that_begins_with_an_array_is_filled_in_place(checkpointer: ckpt.Checkpointer) -> None:
    """Not compared with anything: arrays compare element by element."""
    checkpointer.save(1, {"all": [np.arange(3), torch.ones(2), 7]}).wait(timeout_s=30)
    live = [np.zeros(3, dtype=np.int64), torch.zeros(2), 0]
    first = live[0]
    found = checkpointer.restore({"all": live})
    assert found is not None
    assert found[1]["all"] is live
    assert live[0] is first
    assert (live[0].tolist(), live[1].tolist(), live[2]) == ([0, 1, 2], [1.0, 1.0], 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (Counter(a=1, b=2), Counter(b=5, a=7)),
        (OrderedDict(b=1, a=2), OrderedDict(a=1, b=2)),  # the order in which things were used
        ({"b": 1, "a": torch.ones(1)}, {"a": torch.zeros(1), "b": 0}),
        ({"b": 1, "c": 3, "a": 2}, {"a": 0, "b": 0}),
        (defaultdict(list, b=[1], a=[]), defaultdict(list, a=[2])),
        ([1, 2, 3], []),
        ([torch.ones(1), 2], [5]),
        (deque([1, 2], 3), deque([4, 5, 6], 3)),
    ],
)
def test_a_container_of_the_state_has_what_was_saved_in_its_order(
    saved: Any, live: Any, checkpointer: ckpt.Checkpointer
) -> None:
    checkpointer.save(1, {"x": saved}).wait(timeout_s=30)
    found = checkpointer.restore({"x": live})
    assert found is not None
    assert found[1]["x"] is live
    assert same(live, saved)


def test_a_schedules_state_as_a_dict_goes_on_as_it_was(checkpointer: ckpt.Checkpointer) -> None:
    def made() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    saved, live = made(), made()
    checkpointer.save(1, {"s": saved.state_dict()}).wait(timeout_s=30)
    found = checkpointer.restore({"s": live.state_dict()})
    assert found is not None
    assert found[1]["s"]["milestones"] == {2: 1, 4: 1}
