"""A restore that is refused leaves everything as it was: tensors, values, and objects that had their state by then."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.core.errors import LayoutMismatch, UsageError
from tests.support.ckpt.any_state import Point, same


class Extra(torch.nn.Linear):
    """A module with a state beside its tensors, which it takes only where it is a number."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = 1

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, int):
            raise AttributeError("a number is wanted")
        self.extra = state


class Picky(torch.optim.SGD):
    """An optimizer that takes its state and then finds fault with it."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise AssertionError("not this one")


class Loader:
    """A data loader that goes forward by what it is told."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.at, self.scale, self.average = {"batch": 0}, torch.ones(1), np.zeros(2)

    def state_dict(self) -> Any:
        return {"by": 3}

    def load_state_dict(self, state: Any) -> None:
        self.seen += range(state["by"])
        self.at["batch"] += state["by"]
        self.scale.fill_(7)
        self.average[:] = 5
        self.new = 1
        if state["by"] > 3:
            raise TypeError("too far")


def made(optimizer: Callable[..., Any] = torch.optim.SGD, groups: int = 1) -> dict[str, Any]:
    """A state in which everything can be seen to change."""
    model = torch.nn.Sequential(Extra(), torch.nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    given = parameters if groups == 1 else [{"params": [one]} for one in parameters]
    trained = optimizer(given, lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(trained, 1)
    model(torch.rand(4, 2)).square().sum().backward()
    trained.step()
    schedule.step()
    return {
        "epoch": int(torch.randint(1 << 30, ())), "loader": Loader(), "schedule": schedule, "optimizer": trained,
        "model": model, "list": [torch.rand(2), 1, {"a": np.random.rand(2)}], "z": torch.rand(3),
    }  # fmt: skip


def seen(state: Any) -> Any:
    """All that there is to see of a state, as copies."""
    loader, optimizer, schedule = state["loader"], state["optimizer"], state["schedule"]
    moments = [optimizer.state[one] for group in optimizer.param_groups for one in group["params"]]
    plain = {key: value for key, value in state.items() if key in ("epoch", "list", "z")}
    return copy.deepcopy(
        [plain, dict(state["model"].state_dict()), vars(loader), optimizer.state_dict(), moments, schedule.state_dict()]
    )


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(tmp_path / "checkpoints")


def other_groups(live: Any, saved: Any) -> dict[str, Any]:
    return {**made(groups=4), "list": live["list"]}


def picky(live: Any, saved: Any) -> dict[str, Any]:
    return made(Picky)


def loader(live: Any, saved: Any) -> None:
    saved["loader"].state_dict = lambda: {"by": 4}


def extra(live: Any, saved: Any) -> None:
    saved["model"][0].extra = "text"


def dtype(live: Any, saved: Any) -> None:
    live["z"] = live["z"].double()


def expanded(live: Any, saved: Any) -> None:
    live["z"] = torch.zeros(1).expand(3)


def overlapping(live: Any, saved: Any) -> None:
    saved["z"] = torch.rand(2, 2)
    live["z"] = torch.zeros(3).as_strided((2, 2), (1, 1))


def read_only(live: Any, saved: Any) -> None:
    live["list"][2]["a"].flags.writeable = False


def missing(live: Any, saved: Any) -> None:
    live["zz"] = 1


def tied(live: Any, saved: Any) -> None:
    saved["y"] = torch.rand(3)
    live["y"] = live["z"]


def no_state(live: Any, saved: Any) -> None:
    saved["z"], live["z"] = {"x": 2}, Point()


def sharing(live: Any, saved: Any) -> None:
    whole = torch.rand(5)
    saved["y"], live["y"], live["z"] = torch.rand(3), whole[2:], whole[:3]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_groups, r"state\['optimizer'\]: the optimizer's parameter groups are others .*\['model/0.weight'\]"),
        (picky, r"state\['optimizer'\]: Picky refused its state: not this one"),
        (loader, r"state\['loader'\]: Loader refused its state: too far"),
        (extra, r"state\['model'\]: Sequential refused its state: a number is wanted"),
        (dtype, r"state\['z'\]: the checkpoint holds dtype float32, the state float64"),
        (expanded, r"state\['z'\]: elements of the tensor in the state share memory"),
        (overlapping, r"state\['z'\]: elements of the tensor in the state share memory"),
        (read_only, r"state\['list'\]\[2\]\['a'\]: the array in the state is read-only"),
        (missing, r"state\['zz'\]: the state has it, the checkpoint does not"),
        (tied, r"state\['(y|z)'\] and state\['(y|z)'\] are one tensor in the state"),
        (no_state, r"state\['z'\]: nothing can be restored into it: a Point .* save dataclasses.asdict\(\) of it"),
        (sharing, r"state\['(y|z)'\] shares memory in the state with others \(state\['(y|z)'\]\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refusal_names_the_place_and_changes_nothing(
    spoil: Callable[[Any, Any], Any], message: str, checkpointer: Checkpointer
) -> None:
    live, saved = made(), made()
    live = spoil(live, saved) or live
    checkpointer.save(1, saved).wait(timeout_s=60)
    objects = {key: live[key] for key in ("loader", "schedule", "optimizer", "model", "list", "z")}
    kept = live["loader"].seen, live["loader"].at, live["optimizer"].param_groups, live["list"][2]
    before = seen(live)
    with pytest.raises((LayoutMismatch, UsageError), match=message):
        checkpointer.restore(live)
    assert same(seen(live), before)
    assert all(live[key] is value for key, value in objects.items())
    now = live["loader"].seen, live["loader"].at, live["optimizer"].param_groups, live["list"][2]
    assert all(one is other for one, other in zip(kept, now, strict=True))


def test_what_is_not_refused_is_restored_whole_and_each_object_is_called_once(checkpointer: Checkpointer) -> None:
    live, saved = made(), made()
    checkpointer.save(1, saved).wait(timeout_s=60)
    assert checkpointer.restore(live) is not None
    assert live["loader"].seen == [0, 1, 2]
    ours, theirs = seen(live), seen(saved)
    ours[2] = theirs[2] = None
    assert same(ours, theirs)


def test_a_stream_beside_a_modules_tensors_is_read_from_its_beginning(checkpointer: Checkpointer) -> None:
    class Streams(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            made = io.BytesIO()
            torch.save({"scale": torch.full((2,), self.scale)}, made)
            made.seek(0)
            return made

        def set_extra_state(self, state: Any) -> None:
            self.scale = float(torch.load(state, weights_only=True)["scale"][0])

    one, other = Streams(2, 2), Streams(2, 2)
    one.scale, other.scale = 3.0, 4.0
    checkpointer.save(1, {"m": one}).wait(timeout_s=60)
    checkpointer.restore({"m": other})
    assert other.scale == 3.0
    assert torch.equal(one.weight, other.weight)


def test_hooks_of_modules_see_the_restored_values(checkpointer: Checkpointer) -> None:
    class Derived(torch.nn.Linear):
        total = 0.0

    module, saved = Derived(2, 2), Derived(2, 2)
    module.register_load_state_dict_post_hook(lambda one, keys: setattr(one, "total", one.weight.sum().item()))
    checkpointer.save(1, {"m": saved}).wait(timeout_s=60)
    checkpointer.restore({"m": module})
    assert module.total == saved.weight.sum().item()


def test_the_same_views_on_both_sides_are_restored(checkpointer: Checkpointer) -> None:
    saved, live = torch.rand(6), torch.zeros(6)
    checkpointer.save(1, {"a": saved[:4], "b": saved[2:], "c": saved[::2]}).wait(timeout_s=60)
    checkpointer.restore({"a": live[:4], "b": live[2:], "c": live[::2]})
    assert torch.equal(live, saved)


def test_tensors_that_are_equal_in_the_checkpoint_may_be_one_in_the_state(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"embed": torch.arange(3.0), "head": torch.arange(3.0)}).wait(timeout_s=60)
    one = torch.zeros(3)
    checkpointer.restore({"embed": one, "head": one})
    assert torch.equal(one, torch.arange(3.0))


def test_the_function_that_makes_a_state_is_not_taken_for_one(checkpointer: Checkpointer) -> None:
    """The model would stay as it is, and training would go on from a step that it does not have."""
    live = made()
    checkpointer.save(1, made()).wait(timeout_s=60)
    before = seen(live)
    with pytest.raises(UsageError, match=r"^state: nothing can be restored into it: .*; give what it returns$"):
        checkpointer.restore(lambda: live)
    assert same(seen(live), before)
