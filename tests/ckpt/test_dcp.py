"""torch.distributed.checkpoint over our checkpoints, in one process: what goes in comes out, what may not is told."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.store import checkpoint_index, fence
from resilio_hpc.cli.ckpt import ckpt
from resilio_hpc.core.errors import CheckpointError, UsageError
from tests.support.ckpt.unchecked_step import save_unchecked

DTYPES = [
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64 complex32",
]


def save(directory: Path, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=ResilioWriter(directory, step), **options)


def load(directory: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ResilioReader(directory), **options)
    return state


def failure(act: Any) -> str:
    """The one-line error of the only process."""
    with pytest.raises(dcp.CheckpointException) as raised:
        act()
    ((error, _),) = raised.value.failures.values()
    return f"{type(error).__name__}: {error}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is type(one) and one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().contiguous()
    return plain.view(torch.uint8) if plain.ndim and plain.numel() else plain.reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", " ".join(DTYPES).split())
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
    value = raw.to(torch.uint8).view(dtype).reshape(4, 6)
    save(tmp_path, {"x": value, "scalar": value[1, 2].clone(), "none": value[:0], "strided": value.t()})
    empty = torch.zeros(4, 6, dtype=torch.uint8).to(dtype)
    found = load(tmp_path, {"x": empty.clone(), "scalar": empty[0, 0], "none": empty[:0], "strided": empty.t().clone()})
    assert same(found, {"x": value, "scalar": value[1, 2], "none": value[:0], "strided": value.t()})


def test_views_of_one_storage_and_strided_targets(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    state = {"base": base, "tied": base, "view": base[1:3], "column": base[:, 3], "conj": torch.tensor([1 + 2j]).conj()}
    save(tmp_path, state)
    wide = torch.zeros(10, 6)
    target = {"base": wide.t(), "tied": torch.zeros(6, 10), "view": torch.zeros(2, 10), "column": wide[:6, 0]}
    target |= {"column": torch.zeros(6, 2)[:, 1], "conj": torch.zeros(1, dtype=torch.complex64)}
    assert same(load(tmp_path, target), state)
    assert torch.equal(wide.t(), base)


VALUES = {
    "numbers": [0, -1, 1 << 80, 1.5, math.inf, 2 + 3j],
    "text": "ü\ud800",
    "bytes": b"\0\xff",
    "tuple": (1, (2, "x"), torch.arange(3), np.arange(4.0)),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "numpy": np.float64(2.5),
    "set": {1, 2},
    "counter": (Counter("aab"), OrderedDict(a=1)),
    "torch": (torch.Size([2]), torch.float16, torch.device("cpu")),
    "none": None,
}


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    save(tmp_path, {"deep": {"er": VALUES}})
    found = load(tmp_path, {"deep": {"er": dict.fromkeys(VALUES)}})
    assert same(found, {"deep": {"er": VALUES}})
    with pytest.warns(UserWarning, match="in a single process"):
        assert same(_load_state_dict_from_keys(storage_reader=ResilioReader(tmp_path)), {"deep": {"er": VALUES}})


keys = st.text(st.characters(codec="utf-8", exclude_characters="."), max_size=4) | st.sampled_from(
    ["0", "$dict", "/", ".."]
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([(), (0,), (3,), (2, 0, 2), (2, 3)]).map(torch.rand),
    st.integers(0, 3).map(np.arange),
)
states = st.dictionaries(
    keys.map(lambda key: f"k{key}"),
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
        max_leaves=12,
    ),
    max_size=4,
)


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 7


@given(state=states, flatten=st.booleans())
@settings(max_examples=60)
def test_loads_give_what_torchs_own_storage_gives(state: Any, flatten: bool, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("any")
    writer, reader = dcp.FileSystemWriter(directory / "theirs"), dcp.FileSystemReader(directory / "theirs")
    try:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=flatten))
    except dcp.CheckpointException as error:
        assert "duplicated flatten key" in str(error)
        return
    save(directory / "ours", state, planner=DefaultSavePlanner(flatten_state_dict=flatten))
    theirs, ours = emptied(state), emptied(state)
    try:
        dcp.load(theirs, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=flatten))
    except dcp.CheckpointException as error:  # it takes some states for those of an old version
        assert "Missing key" in str(error)
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            load(directory / "ours", ours, planner=DefaultLoadPlanner(flatten_state_dict=flatten))
        return
    load(directory / "ours", ours, planner=DefaultLoadPlanner(flatten_state_dict=flatten))
    assert same(ours, theirs), (theirs, ours)
    known, mine = reader.read_metadata(), ResilioReader(directory / "ours").read_metadata()
    assert {name: type(entry) for name, entry in mine.state_dict_metadata.items()} == {
        name: type(entry) for name, entry in known.state_dict_metadata.items()
    }


class Custom(DefaultSavePlanner):
    """Pickles by itself, and halves the tensors."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object + 1 if type(object) is int else object)
        return object.half()


def test_a_planner_that_changes_what_is_written_is_respected(tmp_path: Path) -> None:
    save(tmp_path, {"epoch": 3, "x": torch.ones(4), "pair": (1, torch.ones(2))}, planner=Custom())
    found = load(tmp_path, {"epoch": 0, "x": torch.zeros(4), "pair": None})
    assert same(found, {"epoch": 4, "x": torch.ones(4), "pair": (1, torch.ones(2))})  # and dtypes are converted
    assert ResilioReader(tmp_path).read_metadata().state_dict_metadata["x"].properties.dtype == torch.float16


class Halves(DefaultSavePlanner):
    """Writes every tensor in two parts."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            rows = item.tensor_data.size[0] // 2
            for first, count in ((0, rows), (rows, item.tensor_data.size[0] - rows)):
                start = torch.Size([first, 0])
                chunk = ChunkStorageMetadata(start, torch.Size([count, item.tensor_data.size[1]]))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, start)
                items.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index: Any) -> Any:
        whole = self.state_dict[index.fqn]
        rows = whole.shape[0] // 2
        return whole[:rows] if index.offset[0] == 0 else whole[rows:]


def test_a_tensor_that_one_process_writes_in_several_parts(tmp_path: Path) -> None:
    whole = torch.rand(5, 3)
    save(tmp_path, {"x": whole}, planner=Halves())
    assert same(load(tmp_path, {"x": torch.zeros(5, 3)}), {"x": whole})
    target = {"x": torch.zeros(5, 3)}
    assert Checkpointer(tmp_path).restore(target) is not None
    assert same(target, {"x": whole})


def test_plans_that_are_cached(tmp_path: Path) -> None:
    for step in range(3):
        state = {"x": torch.full((3,), float(step)), "list": [step, {"a": step}]}
        save(tmp_path, state, step, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert same(load(tmp_path, {"x": torch.zeros(3), "list": [0, {"a": 0}]}), state)


# -- what does not fit -------------------------------------------------------------------------------------------------


class Raw(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return io.BytesIO(b"not a pickle")


class Other:
    """Something that a checkpoint cannot hold."""


@pytest.mark.parametrize(
    ("state", "planner", "message"),
    [
        ({"a": {"b": Other()}}, None, r"UsageError: state['a']['b']: a Other (tests.ckpt.test_dcp.Other) cannot"),
        ({"a": {"b": Other()}}, Custom(), r"UsageError: a.b: the planner's bytes are not what torch.save makes of"),
        ({"a": 1}, Raw(), r"UsageError: a: the planner's bytes are not what torch.save makes of plain values"),
        ({"x": torch.zeros(2)}, Raw(), "UsageError: x: the planner gives a BytesIO for a tensor"),
        ({"x": torch.eye(2).to_sparse()}, None, "UsageError: state['x']: a tensor of kind torch.sparse_coo"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(state: Any, planner: Any, message: str, tmp_path: Path) -> None:
    assert failure(lambda: save(tmp_path, state, planner=planner)).startswith(message)
    assert checkpoint_index.committed_steps(tmp_path) == []


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(4), "n": 1})
    assert "Size mismatch" in failure(lambda: load(tmp_path, {"x": torch.zeros(5)}))
    assert "Missing key" in failure(lambda: load(tmp_path, {"x": torch.zeros(4), "y": torch.zeros(1)}))
    partly = load(tmp_path, {"x": torch.zeros(4), "y": 5}, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(partly, {"x": torch.ones(4), "y": 5})


def test_step_numbers(tmp_path: Path) -> None:
    for wrong in (-1, 1.0, True, "3", 1 << 53, None):
        with pytest.raises(UsageError, match="is not a whole number from 0 on"):
            ResilioWriter(tmp_path, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is not a whole number from 0 on"):
        ResilioReader(tmp_path, -3)
    assert "holds no committed step" in failure(lambda: load(tmp_path, {"n": 0}))
    for step in (0, 9, 7):
        save(tmp_path, {"n": step}, step)
    assert load(tmp_path, {"n": -1}) == {"n": 7}  # committed last
    found = {"n": -1}
    dcp.load(found, storage_reader=ResilioReader(tmp_path, 9))
    assert found == {"n": 9}
    missing = {"storage_reader": ResilioReader(tmp_path, 5)}
    assert "step 5 is not in" in failure(lambda: dcp.load({"n": 0}, **missing))


def test_a_step_is_replaced_and_old_ones_go(tmp_path: Path) -> None:
    for number in range(5):
        dcp.save({"n": number}, storage_writer=ResilioWriter(tmp_path, number, keep_last=2))
    assert checkpoint_index.committed_steps(tmp_path) == [3, 4]
    dcp.save({"n": 33}, storage_writer=ResilioWriter(tmp_path, 3, keep_last=2))
    assert checkpoint_index.committed_steps(tmp_path) == [4, 3]
    assert load(tmp_path, {"n": 0}) == {"n": 33}


def test_a_checkpoint_id_is_another_directory(tmp_path: Path) -> None:
    writer, reader = ResilioWriter(tmp_path / "never", 4), ResilioReader(tmp_path / "never")
    dcp.save({"n": 1}, checkpoint_id=tmp_path / "there", storage_writer=writer)
    found = {"n": 0}
    dcp.load(found, checkpoint_id=str(tmp_path / "there"), storage_reader=reader)
    assert (found, checkpoint_index.committed_steps(tmp_path / "there")) == ({"n": 1}, [4])
    assert not (tmp_path / "never").exists()
    assert [ResilioWriter.validate_checkpoint_id(name) for name in ("a/b", tmp_path, "s3://x")] == [True, True, False]
    assert reader.checkpoint_id == writer.checkpoint_id == str(tmp_path / "there" / "step-0000000004")


def test_processes_that_do_not_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_collectives=True"):
        save(tmp_path, {"n": 1}, use_collectives=False)
    plans = [LoadPlan([], storage_data=(step, 1)) for step in (3, 4, 4)]
    with pytest.raises(CheckpointError, match=r"found different steps as the newest one \(\[3, 4\]\); give step="):
        ResilioReader(tmp_path).prepare_global_plan(plans)


# -- Checkpointer's steps ----------------------------------------------------------------------------------------------


def test_what_the_checkpointer_saved_can_be_loaded(tmp_path: Path) -> None:
    model, whole = torch.nn.Linear(3, 2), torch.rand(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "slab": Slab(whole, (4, 3), (0, 0)), "values": VALUES, 3: {4: 5}}
    for layout, place in ((None, "own"), (REPLICATED, "replicated")):
        Checkpointer(tmp_path / place, layout=layout).save(1, state).wait()
        target = {"model": torch.nn.Linear(3, 2), "slab": torch.zeros(4, 3), "values": dict.fromkeys(VALUES), "3.4": 0}
        target["optimizer.state.0.exp_avg"] = torch.zeros(2, 3)
        found = load(tmp_path / place, target)
        assert same(dict(found.pop("model").state_dict()), dict(model.state_dict()))
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        assert same(found, {"slab": whole, "values": VALUES, "3.4": 5, "optimizer.state.0.exp_avg": moment})


@pytest.mark.parametrize(
    ("state", "wanted", "message"),
    [
        ({"x": Slab(torch.ones(2), (4,), (1,))}, {"x": torch.zeros(4)}, "holds 2 of the 4 elements of x"),
        ({"a": {"b": 1}, "a.b": 2}, {"a": {"b": 0}}, "two places of the state are a.b for torch.distributed"),
        ({"x": (Slab(torch.ones(2), (4,), (1,)),)}, {"x": ()}, "x cannot be loaded: it holds a tensor that was saved"),
    ],
)
def test_what_cannot_be_loaded_from_it_is_told(state: Any, wanted: Any, message: str, tmp_path: Path) -> None:
    save_unchecked(tmp_path, [{**state, "n": 1}])
    assert message in failure(lambda: load(tmp_path, wanted))


def test_the_checkpointer_restores_a_model_its_optimizer_and_values(tmp_path: Path) -> None:
    def made(kind: Any) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.5), "values": dict.fromkeys(VALUES)}

    for step, kind in enumerate((torch.optim.AdamW, torch.optim.SGD)):
        state = made(kind)
        state["model"](torch.ones(3)).sum().backward()
        state["optimizer"].step()
        save(tmp_path, {**state, "values": VALUES}, step)
        found = made(kind)
        assert Checkpointer(tmp_path).restore(found) == (step, found)
        assert same(found["optimizer"].state_dict(), state["optimizer"].state_dict())
        assert same(dict(found["model"].state_dict()), dict(state["model"].state_dict()))
        assert same(found["values"], VALUES)


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_commands_and_hdf5_programs_work_on_it(tmp_path: Path, capsys: Any) -> None:
    for step in (1, 2):
        save(tmp_path / "c", {"x": torch.ones(4, 3) * step, "n": step}, step)
    for code, *arguments in ((0, "ls"), (0, "show"), (0, "verify"), (1, "diff", "1", "2"), (0, "copy", "../d", "1")):
        command, *rest = (str(tmp_path / "d") if word == "../d" else word for word in arguments)
        assert ckpt.main([command, str(tmp_path / "c"), *rest]) == code
    said = capsys.readouterr().out
    for line in ("step 2, rank 0 of 1", "step 2: good", "x: content, in 1 of 1", "n: 1 → 2", "copied and verified"):
        assert line in said
    assert load(tmp_path / "d", {"n": 0}) == {"n": 1}
    save(tmp_path / "parts", {"x": torch.arange(6.0).reshape(3, 2)}, planner=Halves())
    with h5py.File(tmp_path / "parts" / "step-0000000001" / "node-0.h5") as file:
        assert sorted(file["rank0"]) == ["$table", "$tree", "x", "x$2"]
        assert list(file["rank0/x$2"].attrs["start"]) == [1, 0]
        assert np.array_equal(file["rank0/x$2"], [[2, 3], [4, 5]])


def test_the_epoch_of_the_launcher_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIO_EPOCH", "3")
    monkeypatch.setenv("RESILIO_ROUND", "5")
    save(tmp_path, {"n": 1})
    manifest = checkpoint_index.manifest_of(tmp_path, 1)
    assert (manifest.epoch, manifest.round, manifest.layout, manifest.world_size) == (3, 5, "own", 1)
    fence.raise_fence(tmp_path, 4)
    assert "epoch 3 may not commit any more: epoch 4 has taken over" in failure(lambda: save(tmp_path, {"n": 2}, 2))
    assert checkpoint_index.committed_steps(tmp_path) == [1]


def test_a_background_save_of_one_process_keeps_what_was_there(tmp_path: Path) -> None:
    state = {"x": torch.ones(1 << 16), "n": 1}
    for step in range(3):
        state["x"].fill_(step)
        future = dcp.async_save(state, storage_writer=ResilioWriter(tmp_path, step))
        state["x"].fill_(-1)
        future.result()
        assert torch.equal(load(tmp_path, {"x": torch.zeros(1 << 16)})["x"], torch.full((1 << 16,), float(step)))
