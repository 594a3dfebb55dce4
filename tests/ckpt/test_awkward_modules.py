"""Modules whose state is more than their own tensors, or has other names: they come back, or refuse in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.core.errors import LayoutMismatch


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(tmp_path / "checkpoints")


def restored(checkpointer: Checkpointer, saved: Any, live: Any) -> Any:
    checkpointer.save(1, {"m": saved}).wait(timeout_s=60)
    checkpointer.restore({"m": live})
    return live


class WithExtra(torch.nn.Linear):
    """Its extra state grows while it trains, as the history of scales does for eight-bit floats."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),
        (torch.arange(5), torch.zeros(3)),
        ({"scale": [torch.ones(2)] * 3, "at": 4}, {"scale": [torch.zeros(2)], "other": 1}),
        ([torch.ones(1)], None),
        (None, torch.ones(1)),
    ],
)
def test_extra_state_comes_back_whatever_the_module_has_by_then(
    saved: Any, live: Any, checkpointer: Checkpointer
) -> None:
    one, other = WithExtra(saved), WithExtra(live)
    held = other.weight
    restored(checkpointer, torch.nn.Sequential(one), torch.nn.Sequential(other))
    torch.testing.assert_close(other.extra, saved, rtol=0, atol=0)
    assert other.weight is held
    assert torch.equal(other.weight, one.weight)


class Queue(torch.nn.Module):
    """Its buffer has as many rows as it was given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.register_buffer("queue", torch.rand(rows))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.queue = torch.zeros_like(state_dict[f"{prefix}queue"])
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_resizes_its_tensors_gets_them_in_the_saved_shape(checkpointer: Checkpointer) -> None:
    for rows in (0, 5, 3):
        one, other = Queue(3), Queue(rows)
        restored(checkpointer, torch.nn.Sequential(one), torch.nn.Sequential(other))
        assert torch.equal(one.queue, other.queue)
        assert torch.equal(one.weight, other.weight)


def test_a_shape_that_no_code_of_the_module_changes_is_refused_by_its_place(checkpointer: Checkpointer) -> None:
    live = torch.nn.Sequential(Queue(2), torch.nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in live.state_dict().items()}
    with pytest.raises(LayoutMismatch, match=r"^state\['m'\]\['1.weight'\]: the checkpoint holds shape \[2\]"):
        restored(checkpointer, torch.nn.Sequential(Queue(4), torch.nn.BatchNorm1d(2)), live)
    assert all(torch.equal(before[name], value) for name, value in live.state_dict().items())


class Renamed(torch.nn.Sequential):
    """Knows the names that its parts had in an earlier version."""

    def _load_from_state_dict(self, state_dict: Any, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith("old.")]:
            state_dict[name.replace("old", "0")] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, *args)


def test_a_module_that_knows_its_former_names_is_restored_from_them(checkpointer: Checkpointer) -> None:
    saved = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2), "1": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.5, momentum=0.9)
    live = Renamed(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    checkpointer.save(1, {"m": saved, "o": optimizer}).wait(timeout_s=60)
    found = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    checkpointer.restore({"m": live, "o": found})
    for one, other in zip(saved.parameters(), live.parameters(), strict=True):
        assert torch.equal(one, other)
    assert found.param_groups[0]["lr"] == 0.5


def test_where_it_does_not_know_all_names_nothing_is_changed(checkpointer: Checkpointer) -> None:
    saved = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2), "older": torch.nn.Linear(2, 2)})
    live = Renamed(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before = [parameter.clone() for parameter in live.parameters()]
    with pytest.raises(LayoutMismatch, match=r"^state\['m'\]: Renamed refused its state: .*older.weight"):
        restored(checkpointer, saved, live)
    assert all(map(torch.equal, before, live.parameters()))


class Partial(torch.nn.Sequential):
    """Saves some of its tensors, and does not load without the others."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name[0] == "0"}


def test_a_module_that_saves_less_than_it_loads_is_refused_before_anything_changes(checkpointer: Checkpointer) -> None:
    live, beside = Partial(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.zeros(2)
    before = live[0].weight.clone()
    checkpointer.save(1, {"beside": torch.ones(2), "m": Partial(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))}).wait()
    with pytest.raises(LayoutMismatch, match=r"^state\['m'\]: Partial refused its state: .*Missing key.*$") as raised:
        checkpointer.restore({"beside": beside, "m": live})
    assert "\n" not in str(raised.value)
    assert torch.equal(live[0].weight, before)
    assert torch.equal(beside, torch.zeros(2))


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel, which needs a process group."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def plain(rows: int = 2) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, rows), torch.nn.BatchNorm1d(rows))
    model(torch.rand(4, 2))
    return model


WRAPPED = {"plain": lambda model: model, "DDP": Wrapper, "compiled": torch.compile}


@pytest.mark.parametrize("live", WRAPPED)
@pytest.mark.parametrize("saved", WRAPPED)
def test_a_wrapper_around_a_model_may_come_and_go(saved: str, live: str, checkpointer: Checkpointer) -> None:
    one, other = plain(), plain()
    versions = []
    other[1]._register_load_state_dict_pre_hook(lambda _, __, metadata, *___: versions.append(metadata.get("version")))
    restored(checkpointer, WRAPPED[saved](one), WRAPPED[live](other))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert set(versions) == {2}  # the one that batch norms save


def test_other_names_than_those_of_wrappers_are_told(checkpointer: Checkpointer) -> None:
    model = Wrapper(plain())
    model.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(LayoutMismatch, match=r"only in the module: \['weight', 'module.0.weight'"):
        restored(checkpointer, plain(), model)


def test_a_meta_model_gets_memory_within_torchs_meta_device(checkpointer: Checkpointer) -> None:
    saved = plain()
    checkpointer.save(1, {"m": saved, "strided": torch.arange(6.0)[::2], "new": [torch.ones(2)]}).wait(timeout_s=60)
    strided = torch.zeros(6)[::2]
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        found = checkpointer.restore({"m": model, "strided": strided, "new": []})
    assert found is not None
    assert torch.equal(model[0].weight, saved[0].weight)
    assert torch.equal(strided, torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(found[1]["new"][0], torch.ones(2))
