"""What is forgotten in a state is named, and it alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow  # a process of its own, whose first optimizer imports much of torch

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from resilio_hpc import ckpt, train

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
head = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
second = torch.optim.SGD(head.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 5)], [3]
)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
noise = torch.Generator().manual_seed(7)
loader = train.TrackedLoader(DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True))
evaluation = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
batches = loader.batches()

def step():
    (x,) = next(batches)
    loss = head(model(x + torch.randn(x.shape, generator=noise))).square().mean()
    optimizer.zero_grad(), second.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer), scaler.step(second), scaler.update()
    schedule.step()

for _ in range(3):
    step()
list(evaluation)
parts = {
    "model": model, "head": head, "optimizer": optimizer, "second": second, "schedule": schedule, "scaler": scaler,
    "noise": noise.get_state(), "data": loader, "random": ckpt.rng_state(),
}
print("whole", ckpt.audit(parts), ckpt.audit(lambda: parts))
dicts = {
    name: part.state_dict() if hasattr(part, "state_dict") and part is not loader else part
    for name, part in parts.items()
}
print("dicts", ckpt.audit(dicts))
for name in parts:
    print(name, ckpt.audit({key: part for key, part in parts.items() if key != name}))
print("buffers", ckpt.audit({**parts, "model": dict(model.named_parameters())}))
"""
FOUND = {
    "whole": "[] []",
    "dicts": "[]",
    "model": "['6 parameters that an optimizer trains: 0.weight, 0.bias, 1.weight, 3 more', "
    "'3 buffers: 1.running_mean, 1.running_var, 1.num_batches_tracked']",
    "head": "['2 parameters that an optimizer trains: weight, bias']",
    "optimizer": "['optimizer AdamW with 6 parameters']",
    "second": "['optimizer SGD with 2 parameters']",
    "schedule": "['schedule SequentialLR']",
    "scaler": "['scaler GradScaler']",
    "noise": "['a torch.Generator on cpu (seed 7)']",
    "data": "['position of DataLoader over TensorDataset (train.LoaderPosition)']",
    "random": "['the global random number generators (ckpt.rng_state())']",
    "buffers": "['3 buffers: 1.running_mean, 1.running_var, 1.num_batches_tracked']",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """A process of its own: others' tests leave optimizers behind."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("missing", FOUND)
def test_a_part_that_is_missing_is_named_alone(said: dict[str, str], missing: str) -> None:
    assert said[missing] == FOUND[missing]
