"""State of optimizers comes back to the parameters that it is of, in the dtype and the shape in which it was saved."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.core.errors import LayoutMismatch
from tests.support.ckpt.any_state import same


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(tmp_path / "checkpoints")


class Masters(torch.optim.SGD):
    """Keeps parameters, and more below, in float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.float() + 1e-4)
                state.setdefault(
                    "nested", {"list": [parameter.double() / 3, 1], "count": torch.ones((), dtype=torch.int64)}
                )
                state["master"] -= 1e-4 * parameter.grad.float()
                parameter.copy_(state["master"])


def trained(optimizer: Any, model: torch.nn.Module) -> Any:
    model(torch.rand(3, 3, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [Masters, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_comes_back_with_its_dtype(kind: Any, dtype: torch.dtype, checkpointer: Checkpointer) -> None:
    model, other = torch.nn.Linear(3, 3).to(dtype), torch.nn.Linear(3, 3).to(dtype)
    optimizer = trained(kind(model.parameters(), lr=0.1), model)
    for values in optimizer.state.values():  # as mixed-precision optimizers keep them
        values.update({key: value.float() for key, value in values.items() if torch.is_tensor(value)})
    checkpointer.save(1, {"m": model, "o": optimizer}).wait(timeout_s=60)
    found = kind(other.parameters(), lr=0.1)
    checkpointer.restore({"m": other, "o": found})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.state[two], optimizer.state[one], rtol=0, atol=0)
        assert all(found.state[two][key].dtype == value.dtype for key, value in _tensors(optimizer.state[one]))
    again = trained(found, other) if kind is Masters else None
    assert again is None or again.state[other.weight]["master"].dtype == torch.float32


def _tensors(state: dict[str, Any]) -> Any:
    return ((key, value) for key, value in state.items() if torch.is_tensor(value))


class Two(torch.nn.Module):
    def __init__(self, order: str, inner: type[torch.nn.Module] = torch.nn.Linear) -> None:
        super().__init__()
        self.order = order
        for name in order:
            setattr(self, name, torch.nn.Linear(2, 2, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * 3 + self.b(x) * 100


def named(model: torch.nn.Module, prefix: str = "", groups: str = "") -> Any:
    found = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    if not groups:
        return torch.optim.Adam(found)
    return torch.optim.Adam(
        [
            {"params": [one for one in found if one[0][len(prefix)] == letter], "lr": 1 / ord(letter)}
            for letter in groups
        ]
    )


def stepped(optimizer: Any, model: torch.nn.Module) -> Any:
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({}, {}),
        ({"prefix": "module."}, {"prefix": "_orig_mod."}),
        ({"prefix": "module.", "groups": "ab"}, {"groups": "ba"}),
        ({"groups": "ab"}, {"groups": "ab"}),
    ],
)
def test_state_follows_the_names_of_parameters(saved: Any, live: Any, checkpointer: Checkpointer) -> None:
    one, other = Two("ab"), Two("ba")
    optimizer, found = stepped(named(one, **saved), one), named(other, **live)
    checkpointer.save(1, {"m": one, "o": optimizer}).wait(timeout_s=60)
    checkpointer.restore({"m": other, "o": found})
    for name in "ab":
        left, right = optimizer.state[getattr(one, name).weight], found.state[getattr(other, name).weight]
        assert torch.equal(left["exp_avg"], right["exp_avg"])
    assert [group["lr"] for group in found.param_groups] == [
        1 / ord(letter) if "groups" in live else 0.001 for letter in live.get("groups", "-")
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"names": ["a.weight", "c.weight"]},
            r"only in the optimizer: \['c.weight'\], only in the checkpoint: \['b.weight'\]",
        ),
        ({"groups": "ab"}, r"groups are others than in the checkpoint: none there has the parameters \['a.weight'\]"),
    ],
)
def test_other_names_or_groups_are_refused(names: Any, message: str, checkpointer: Checkpointer) -> None:
    one, other = Two("ab"), Two("ab")
    checkpointer.save(1, {"o": stepped(named(one), one)}).wait(timeout_s=60)
    found = named(other, groups=names.get("groups", ""))
    if "names" in names:
        found = torch.optim.Adam(list(zip(names["names"], other.parameters(), strict=True)))
    with pytest.raises(LayoutMismatch, match=message):
        checkpointer.restore({"o": found})
    assert not found.state


def test_state_of_a_parameter_of_another_shape_is_refused(checkpointer: Checkpointer) -> None:
    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(2, 3)
    for step, kind in enumerate((torch.optim.AdamW, torch.optim.Adafactor, Masters)):
        optimizer = trained(kind(one.parameters(), lr=0.1), one)
        checkpointer.save(step, {"object": optimizer, "dict": optimizer.state_dict()}).wait(timeout_s=60)
        with pytest.raises(
            LayoutMismatch, match=r"state\['object'\]: .* of shape \[3, 3\], parameter 0 .* shape \[3, 2\]"
        ):
            checkpointer.restore({"object": kind(other.parameters(), lr=0.1), "dict": {}}, step=step)
    with pytest.raises(LayoutMismatch, match=r"state\['dict'\]: .*exp_avg.* shape \[3, 3\], parameter 0"):
        state = {"object": torch.optim.AdamW(one.parameters()), "dict": torch.optim.AdamW(other.parameters())}
        checkpointer.restore(state, step=0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("later", [torch.channels_last, torch.contiguous_format])
def test_state_is_laid_out_as_its_parameter_for_fused_steps(kind: Any, later: Any, checkpointer: Checkpointer) -> None:
    """A fused step goes through parameter and state as they lie in memory, and minds no strides."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def made() -> Any:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(4, 8, 2).to(memory_format=torch.channels_last)  # no rest after whole vectors
        return model, kind(model.parameters(), lr=0.1, fused=True, **options)

    def step(model: Any, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        (model.weight * torch.randn(model.weight.shape)).sum().backward()
        optimizer.step()

    one, optimizer = made()
    step(one, optimizer, 2)
    checkpointer.save(1, {"m": one, "o": optimizer}).wait(timeout_s=60)
    other, found = made()
    other.to(memory_format=later)
    checkpointer.restore({"m": other, "o": found})
    for value in found.state[other.weight].values():
        assert value.shape != other.weight.shape or value.stride() == other.weight.stride()
    for seed in (3, 4):
        step(one, optimizer, seed)
        step(other, found, seed)
    assert torch.equal(one.weight, other.weight)


def test_values_that_torch_takes_apart_come_back_as_they_were(checkpointer: Checkpointer) -> None:
    def made(order: str) -> Any:
        weights = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
        return weights, torch.optim.SGD([(name, weights[name]) for name in order], lr=1.0)

    one, optimizer = made("ab")
    values = {
        "mode": "warm",
        "seen": deque([1, torch.ones(1)], 3),
        "by": OrderedDict(b=torch.zeros(1), a=b"x"),
        "n": (1, 2.5),
    }
    optimizer.state[one["a"]] = values
    optimizer.state["all"] = {"count": 7}
    checkpointer.save(1, {"o": optimizer}).wait(timeout_s=60)
    for order in ("ab", "ba"):  # state of no parameter comes along where parameters are in another order
        other, found = made(order)
        checkpointer.restore({"o": found})
        assert same(found.state[other["a"]], values)
        assert found.state["all"] == {"count": 7}


def test_an_optimizer_of_another_kind_is_refused(checkpointer: Checkpointer) -> None:
    """torch takes it, and fails in the next step."""
    model = Two("ab")
    checkpointer.save(1, {"o": stepped(torch.optim.Adam(model.parameters()), model)}).wait(timeout_s=60)
    found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(LayoutMismatch, match=r"^state\['o'\]: .* kind of optimizer than SGD: .*'betas'.*'momentum'"):
        checkpointer.restore({"o": found})
    assert (found.param_groups[0]["lr"], found.state) == (0.1, {})
    stepped(found, model)


def test_a_setting_that_an_optimizer_has_by_now_stays(checkpointer: Checkpointer) -> None:
    class Later(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.5)
            for group in (self.defaults, *self.param_groups):
                group["warm"] = 7

    model = Two("ab")
    saved = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.optim.lr_scheduler.StepLR(saved, 1)  # it leaves a value of its own in the groups
    checkpointer.save(1, {"o": saved}).wait(timeout_s=60)
    found = Later(model.parameters())
    checkpointer.restore({"o": found})
    assert (found.param_groups[0]["lr"], found.param_groups[0]["warm"]) == (0.25, 7)


@pytest.mark.parametrize("groups", ["", "ab"])
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile])
def test_state_follows_modules_that_are_made_in_another_order(
    groups: str, wrap: Any, checkpointer: Checkpointer
) -> None:
    """torch numbers parameters: of two of one shape, either would get the other's state."""

    def made(model: Two) -> Any:
        if not groups:
            return torch.optim.Adam(model.parameters())
        parts = [{"params": getattr(model, name).parameters(), "lr": 1 / ord(name)} for name in groups]
        return torch.optim.Adam(parts if model.order == "ab" else parts[::-1])

    one, other = Two("ab"), Two("ba")
    optimizer, found = stepped(made(one), one), made(other)
    checkpointer.save(1, {"o": optimizer, "m": wrap(one)}).wait(timeout_s=60)
    checkpointer.restore({"o": found, "m": other})
    for name in "ab":
        left, right = optimizer.state[getattr(one, name).weight], found.state[getattr(other, name).weight]
        assert torch.equal(left["exp_avg"], right["exp_avg"])
    if groups:
        assert [group["lr"] for group in found.param_groups] == [1 / ord(name) for name in "ba"]


def test_parameters_of_other_groups_than_in_the_checkpoint_are_refused(checkpointer: Checkpointer) -> None:
    one, other = Two("ab"), Two("ab")
    optimizer = stepped(torch.optim.Adam([{"params": [one.a.weight]}, {"params": [one.b.weight], "lr": 1.0}]), one)
    found = torch.optim.Adam([{"params": [other.b.weight, other.a.weight]}])
    checkpointer.save(1, {"m": one, "o": optimizer}).wait(timeout_s=60)
    with pytest.raises(
        LayoutMismatch, match=r"state\['o'\]: the optimizer's parameter groups are others .*'m/b.weight'"
    ):
        checkpointer.restore({"m": other, "o": found})


def test_without_its_module_an_optimizers_state_follows_positions(checkpointer: Checkpointer) -> None:
    one, other = Two("ab"), Two("ab")
    optimizer, found = stepped(torch.optim.Adam(one.parameters()), one), torch.optim.Adam(other.parameters())
    checkpointer.save(1, {"m": one, "o": optimizer}).wait(timeout_s=60)
    checkpointer.restore({"o": found})  # without its module
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[left]["exp_avg"], found.state[right]["exp_avg"])
