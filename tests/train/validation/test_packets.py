"""A micro-batch that another rank computes is the same there, bit for bit."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy
import pytest
import torch

from resilio_hpc.ckpt.state.rng import rng_state
from resilio_hpc.train.validation.packets import BatchWork, CannotTravel, packed, unpacked
from resilio_hpc.train.validation.rewind import Position


def work(batch: object, model: torch.nn.Module) -> BatchWork:
    position = Position(model, ())
    return BatchWork(batch, position.generators, position.buffers)


def batch(rows: int) -> object:
    return OrderedDict(
        x=torch.randn(rows, 3).to(torch.bfloat16), y=[torch.randint(0, 9, (rows,)), ("text", 3, None, 2.5, True)],
        z=torch.randn(3, rows).t(), empty=torch.empty(0, 4), scalar=torch.tensor(7.0), bits=torch.rand(rows) > 0.5,
    )  # fmt: skip


def test_batches_generators_and_buffers_arrive() -> None:
    model = torch.nn.BatchNorm1d(3)
    model(torch.randn(8, 3))
    random.seed(3)
    sent = work(batch(5), model)
    drawn = torch.rand(1), random.random(), numpy.random.random()
    data = packed(sent)
    model(torch.randn(8, 3))
    own = work(batch(2), model)  # another shape, the same structure
    found = unpacked(data, own)
    assert type(found.batch) is OrderedDict
    assert found.batch["y"][1] == ("text", 3, None, 2.5, True)
    for name in ("x", "z", "empty", "scalar", "bits"):
        assert torch.equal(found.batch[name], sent.batch[name])
        assert found.batch[name].dtype == sent.batch[name].dtype
    assert all(map(torch.equal, found.buffers, sent.buffers))
    here = Position(model, ())
    here.take(found.generators, found.buffers)
    assert (torch.rand(1), random.random(), numpy.random.random()) == drawn
    assert torch.equal(model.running_mean, sent.buffers[0])
    here.go_back()
    assert torch.equal(model.running_mean, own.buffers[0])


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.Generator()])
def test_what_is_neither_tensor_nor_plain_does_not_travel(value: object) -> None:
    with pytest.raises(CannotTravel):
        packed(work({"value": value}, torch.nn.Linear(1, 1)))


def test_batches_of_other_structures_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    data = packed(work([torch.ones(1), torch.ones(1)], model))
    with pytest.raises(CannotTravel):
        unpacked(data, work([torch.ones(1)], model))


def test_all_generators_travel() -> None:
    assert set(rng_state()) <= {"python", "numpy", "torch", "cuda"}
