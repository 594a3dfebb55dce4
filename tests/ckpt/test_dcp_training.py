"""What training programs do with torch.distributed.checkpoint: the scenarios of torch's own tests, over our storage."""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from tests.support.ckpt.any_state import same


def save(directory: Path, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=ResilioWriter(directory, step), **options)


def load(directory: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ResilioReader(directory), **options)
    return state


class Progress(Stateful):
    """Of a training: its losses are a stream that torch.save has written, as large programs have them."""

    def __init__(self, step: int = 0, losses: tuple[float, ...] = ()) -> None:
        self.step, self.losses = step, list(losses)

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": stream}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"], weights_only=True)


class Kept(torch.nn.Linear):
    """A module with scales in a stream beside its weights, as libraries for float8 have them."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 2)
        self.scale = scale

    def get_extra_state(self) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save({"scale": torch.tensor(self.scale)}, stream)
        return stream

    def set_extra_state(self, state: Any) -> None:
        state.seek(0)
        self.scale = float(torch.load(state, weights_only=True)["scale"])


def trained(scale: float = 2.0) -> tuple[Kept, torch.optim.Optimizer]:
    model = Kept(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale / 10)
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    plain = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    return [plain, model.scale, optimizer.state_dict()]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_training_is_saved_and_loaded_with_all_that_it_has(how: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    parts, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": parts, "optimizer": of_optimizer, "progress": Progress(7, (0.5, 0.25)), "epoch": np.int64(3)}
    writer = ResilioWriter(tmp_path, 7)
    if how == "save":
        dcp.save(state, storage_writer=writer)
    else:
        dcp.async_save(state, storage_writer=writer).result()
    other, other_optimizer = trained(5.0)
    parts, of_optimizer = get_state_dict(other, other_optimizer)
    progress = Progress()
    found = load(tmp_path, {"model": parts, "optimizer": of_optimizer, "progress": progress, "epoch": 0})
    set_state_dict(other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert same(states(other, other_optimizer), states(model, optimizer))
    assert (progress.step, progress.losses, found["epoch"], type(found["epoch"])) == (7, [0.5, 0.25], 3, np.int64)


def test_objects_and_plain_dicts_load_what_either_saved(tmp_path: Path) -> None:
    save(tmp_path, {"progress": Progress(3, (1.0,))}, 1)
    stream = io.BytesIO()
    found = load(tmp_path, {"progress": {"step": torch.tensor(0, dtype=torch.int32), "losses": stream}})
    assert int(found["progress"]["step"]) == 3
    save(tmp_path, found, 2)
    progress = Progress()
    load(tmp_path, {"progress": progress})
    assert (progress.step, progress.losses) == (3, [1.0])


def test_streams_and_the_checkpointer_know_each_other(tmp_path: Path) -> None:
    at_end = io.BytesIO()
    at_end.write(b"\0state")
    state = {"stream": at_end, "list": [io.BytesIO(b"x"), 1], "empty": io.BytesIO()}
    save(tmp_path / "dcp", state)
    found = Checkpointer(tmp_path / "dcp").restore()
    assert found is not None
    assert same(found[1], state)
    Checkpointer(tmp_path / "ours").save(1, state).wait(timeout_s=60)
    assert same(load(tmp_path / "ours", dict.fromkeys(state)), state)


class Own(DefaultSavePlanner):
    """Makes the bytes of values by itself."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def test_a_planner_of_ones_own_may_hand_over_streams(tmp_path: Path) -> None:
    state = {"stream": io.BytesIO(b"abc"), "path": Path("a/b"), "x": torch.ones(2)}
    save(tmp_path, state, planner=Own())
    assert same(load(tmp_path, {"stream": None, "path": None, "x": torch.zeros(2)}), state)


def test_keys_in_another_order_and_some_of_them(tmp_path: Path) -> None:
    state = OrderedDict((name, torch.full((2,), float(number))) for number, name in enumerate("abcd"))
    save(tmp_path, {"model": state, "n": 1})
    wanted = {"n": 0, "model": {name: torch.zeros(2) for name in "dbac"}}
    assert same(dict(load(tmp_path, wanted)["model"]), {name: state[name] for name in "dbac"})
    some = load(tmp_path, {"model": {"c": torch.zeros(2)}})
    assert same(some, {"model": {"c": state["c"]}})
    more = {"model": {"c": torch.zeros(2), "new": torch.full((1,), 7.0)}, "other": "mine"}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: (model\.new|other)"):
        load(tmp_path, more)
    partly = load(tmp_path, more, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(partly, {"model": {"c": state["c"], "new": torch.full((1,), 7.0)}, "other": "mine"})


def test_a_step_that_is_saved_again_holds_nothing_of_the_former(tmp_path: Path) -> None:
    for number, names in enumerate(("ab", "bc")):
        save(tmp_path, {name: torch.full((2,), float(number)) for name in names})
    known = ResilioReader(tmp_path).read_metadata().state_dict_metadata
    assert set(known) == {"b", "c"}
    assert same(load(tmp_path, {"b": torch.zeros(2)}), {"b": torch.ones(2)})


def test_metadata_says_what_torch_says_of_the_same_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {
        "model": model,
        "optimizer": optimizer,
        "list": [1, {"x": torch.ones(2)}],
        "deque": deque([1, torch.ones(1)]),
    }
    save(tmp_path / "ours", state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    ours = ResilioReader(tmp_path / "ours").read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    for name, known in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(known)
        assert isinstance(known, TensorStorageMetadata | BytesStorageMetadata)
        if isinstance(known, TensorStorageMetadata):
            assert (mine.size, mine.chunks, mine.properties.dtype) == (known.size, known.chunks, known.properties.dtype)
    assert ours.planner_data == theirs.planner_data


class Failing(ResilioWriter):
    """Storage that fails at a place."""

    where = ""

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._fails("prepare_local_plan") or super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self._fails("prepare_global_plan") or super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._fails("write_data") or super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        return self._fails("finish") or super().finish(metadata, results)

    def _fails(self, where: str) -> None:
        if where == self.where:
            raise ValueError(f"in {where}")


@pytest.mark.parametrize("where", ["prepare_local_plan", "prepare_global_plan", "write_data", "finish"])
def test_a_save_that_fails_anywhere_commits_nothing_and_harms_nothing(where: str, tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(3)}, 1)
    writer = Failing(tmp_path, 2)
    writer.where = where
    with pytest.raises(dcp.CheckpointException, match=f"in {where}"):
        dcp.save({"x": torch.zeros(3)}, storage_writer=writer)
    assert same(load(tmp_path, {"x": torch.zeros(3)}), {"x": torch.ones(3)})
    save(tmp_path, {"x": torch.full((3,), 2.0)}, 2)
    assert Checkpointer(tmp_path).steps() == [1, 2]


def test_items_that_a_planner_renames_are_found_by_their_new_names(tmp_path: Path) -> None:
    class Renames(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, *arguments: Any, **options: Any) -> None:
            super().set_up_planner({"ema": state_dict}, *arguments, **options)

    save(tmp_path, {"x": torch.ones(2), "n": 5}, planner=Renames())
    assert same(load(tmp_path, {"ema": {"x": torch.zeros(2), "n": 0}}), {"ema": {"x": torch.ones(2), "n": 5}})


def test_a_planner_sees_items_of_both_kinds_once(tmp_path: Path) -> None:
    seen: list[tuple[str, WriteItemType]] = []

    class Counts(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            seen.append((write_item.index.fqn, write_item.type))
            return super().resolve_data(write_item)

    shared = torch.ones(4)
    save(tmp_path, {"a": shared, "b": shared, "n": [1, 2]}, planner=Counts())
    assert sorted(name for name, _ in seen) == ["a", "b", "n"]
    assert dict(seen)["n"] is WriteItemType.BYTE_IO
