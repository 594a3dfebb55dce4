"""Models that were built on the meta device: a restore gives their tensors memory and fills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc import ckpt
from resilio_hpc.core.errors import LayoutMismatch, UsageError


class Model(torch.nn.Module):
    """With tied weights, and buffers of both kinds."""

    def __init__(self, persistent: bool = True, width: int = 6) -> None:
        super().__init__()
        self.into = torch.nn.Embedding(11, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.out = torch.nn.Linear(width, 11, bias=False)
        self.out.weight = self.into.weight
        self.register_buffer("table", torch.arange(4.0), persistent=persistent)
        self.norm.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.norm(self.into(tokens))) * self.table.sum()


def made(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randint(0, 11, (8,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ckpt.Checkpointer, list[float]]:
    """A checkpoint after three steps, and the losses of the next four."""
    torch.manual_seed(1)
    model = Model()
    optimizer = made(model)
    train(model, optimizer, range(3))
    checkpointer = ckpt.Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(3, {"model": model, "optimizer": optimizer}).wait("committed", 60)
    return checkpointer, train(model, optimizer, range(3, 7))


def on_meta(**how: Any) -> Model:
    with torch.device("meta"):
        return Model(**how)


def test_training_goes_on_bit_by_bit_with_an_optimizer_made_before(
    saved: tuple[ckpt.Checkpointer, list[float]],
) -> None:
    checkpointer, losses = saved
    model = on_meta()
    optimizer = made(model)
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    assert checkpointer.restore({"model": model, "optimizer": optimizer}) is not None
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert model.out.weight is model.into.weight
    assert not model.norm.weight.requires_grad
    assert model.into.weight.requires_grad
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert train(model, optimizer, range(3, 7)) == losses


def test_a_plain_tensor_gets_memory_where_it_is(tmp_path: Path) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.arange(5.0), "y": torch.arange(6).reshape(2, 3).T}).wait("committed", 60)
    state = {"x": torch.empty(5, device="meta"), "y": torch.empty(3, 2, dtype=torch.int64, device="meta")}
    x = state["x"]
    assert checkpointer.restore(state) is not None
    assert state["x"] is x
    assert torch.equal(x, torch.arange(5.0))
    assert torch.equal(state["y"], torch.arange(6).reshape(2, 3).T)


def test_what_does_not_fit_is_said_before_anything_has_memory(saved: tuple[ckpt.Checkpointer, list[float]]) -> None:
    checkpointer, _ = saved
    model = on_meta(width=7)
    with pytest.raises(LayoutMismatch, match=r"holds shape \[11, 6\], the state \[11, 7\]"):
        checkpointer.restore({"model": model, "optimizer": made(model)})
    assert all(value.device.type == "meta" for value in model.state_dict().values())


def test_a_buffer_that_no_checkpoint_holds_is_named(saved: tuple[ckpt.Checkpointer, list[float]]) -> None:
    checkpointer, _ = saved
    model = on_meta(persistent=False)
    with pytest.raises(UsageError, match="the buffer table is on the meta device"):
        checkpointer.restore({"model": model, "optimizer": made(model)})
    assert model.into.weight.device.type == "meta"


def test_a_tensor_that_torch_cannot_exchange_is_told_with_what_to_do(tmp_path: Path) -> None:
    checkpointer = ckpt.Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.arange(4.0)}).wait("committed", 60)
    leaf = torch.empty(4, device="meta", requires_grad=True)
    graph = leaf * leaf  # refers to the tensor itself
    with pytest.raises(UsageError, match=r"use to_empty\(\) first"):
        checkpointer.restore({"x": leaf})
    assert graph.device.type == "meta"


def test_what_lies_on_the_meta_device_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="meta"):
        ckpt.Checkpointer(tmp_path).save(1, {"x": torch.empty(4, device="meta")})
