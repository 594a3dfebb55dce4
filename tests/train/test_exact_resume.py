"""Bit-exact resume with plain DDP, over real gloo groups of four ranks."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.process import run
from resilio_hpc.train import warm_up_ddp
from tests.support.environments import SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S

KINDS = ("plain", "static", "view", "unused")
LIVES = [f"{kind}-{course}-warm" for kind in KINDS for course in ("undisturbed", "interrupted")]
CONTROL = ["plain-undisturbed-cold", "plain-interrupted-cold"]


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("lives")
    program = SUPPORT / "train" / "resume_lives.py"
    done = run(
        [sys.executable, str(program), str(directory), *LIVES, *CONTROL],
        timeout_s=PATIENCE_S,
        env=scrubbed(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
    )
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_ends_with_the_same_bits(hashes: dict[str, str], kind: str) -> None:
    assert hashes[f"{kind}-interrupted-warm"] == hashes[f"{kind}-undisturbed-warm"]


def test_without_the_warm_up_plain_ddp_does_not(hashes: dict[str, str]) -> None:
    """The control: the problem exists. Should it ever pass here, the warm-up can go."""
    assert hashes["plain-interrupted-cold"] != hashes["plain-undisturbed-cold"]


@pytest.fixture
def group(tmp_path: Path) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_warm_up_leaves_no_trace() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    kept = torch.full((4,), 3.0)
    list(model.parameters())[1].grad = kept
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()

    def forward_backward() -> None:
        model(torch.randn(8, 4) * random.random()).square().sum().backward()

    assert warm_up_ddp(model, forward_backward) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients[1] is kept and torch.equal(kept, torch.full((4,), 3.0))
    assert gradients[0] is None and gradients[2] is None
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


@pytest.mark.usefixtures("group")
def test_a_pass_that_does_not_go_through_ddp_is_an_error() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="must call the DDP-wrapped model"):
        warm_up_ddp(model, lambda: model.module(torch.ones(2, 4)).sum())


@pytest.mark.usefixtures("group")
def test_a_pass_that_steps_the_optimizer_is_an_error() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_backward() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="changed parameters"):
        warm_up_ddp(model, forward_backward)


def test_a_model_without_ddp_needs_nothing() -> None:
    assert warm_up_ddp(nn.Linear(2, 2), lambda: pytest.fail("must not be called")) == 0
