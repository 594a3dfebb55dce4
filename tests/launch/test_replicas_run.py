"""Under the real launcher: one flipped bit of one replica is found, blamed, and with ``restore`` taken back.

Ranks train as DDP does. The run that went back ends with the same weights as one without a fault.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK, WITHIN = 38, 23, 10
SCRIPT = (
    """
import sys, time
import torch, torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

where = sys.argv[1]
run = train.attach()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpoint = Checkpointer(layout=REPLICATED)
state = {"model": model, "optimizer": optimizer}
start, _ = checkpoint.restore(state) or (0, None)
for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=5, compare_within=WITHIN):
    optimizer.zero_grad()
    draws = torch.Generator().manual_seed(1000 * step + run.rank)
    model(torch.randn(4, 64, generator=draws)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    while step == STRUCK and len(checkpoint.steps()) < 2:
        time.sleep(0.02)  # with the second commit, the controller knows of the first one
    strikes = step == STRUCK and run.rank == 1 and run.restart_count == 0
    if strikes and where == "gradient":
        model[0].weight.grad.view(torch.int32)[5, 5] ^= 1 << 12
    optimizer.step()
    if strikes and where == "parameter":
        model[1].weight.data.view(torch.int32)[0, 3] ^= 1 << 5
    if strikes and where == "optimizer":
        optimizer.state[model[1].bias]["exp_avg_sq"].view(torch.int32)[2] ^= 1 << 22
    time.sleep(0.02)
print("END", run.rank, *(value for one in model.parameters() for value in one.detach().double().sum().view(1).tolist()))
""".replace("STEPS", str(STEPS))
    .replace("STRUCK", str(STRUCK))
    .replace("WITHIN", str(WITHIN))
)


def launch(path: Path, where: str, *options: str) -> tuple[int, list[list[str]], dict[str, list[dict[str, Any]]]]:
    """Return the exit code, what ranks had at the end, and the ledger's events by kind."""
    (path / "train.py").write_text(SCRIPT)
    argv = ["--run-dir", "run", "--nproc-per-node", "3", *options, "train.py", where]
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
        cwd=path, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    ends = [line.partition("END ")[2].split() for line in done.stdout.splitlines() if "END" in line]
    events: dict[str, list[dict[str, Any]]] = {}
    for event in read_ledger(path / "run" / "ledger"):
        events.setdefault(event.kind, []).append(event.fields)
    return done.returncode, sorted(ends), events


def weights() -> list[float]:
    """What training without a fault gives."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        grads = []
        for rank in range(3):
            optimizer.zero_grad()
            draws = torch.Generator().manual_seed(1000 * step + rank)
            model(torch.randn(4, 64, generator=draws)).square().mean().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, *of_ranks in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(of_ranks)
        optimizer.step()
    return [float(one.detach().double().sum()) for one in model.parameters()]


@pytest.mark.slow
def test_a_flipped_bit_of_a_parameter_is_taken_back(tmp_path: Path) -> None:
    code, ends, events = launch(tmp_path, "parameter", "--on-corruption", "restore")
    (found,) = events["digests_differ"]
    assert (found["ranks"], found["certain"], found["replicas"]) == ([1], True, 3)
    assert STRUCK < found["step"] <= STRUCK + WITHIN
    assert 5 <= found["verified"] <= 20  # what is committed with step 25 has the flipped bit
    (failed,) = events["rank_failed"]
    assert (failed["kind"], failed["rank"], failed["class"]) == ("corruption", 1, "gpu_hardware")
    assert events["first_step"][-1]["restored"] == found["verified"]
    assert events["recovered"][-1]["kind"] == "corruption"
    assert events["step_verified"][-1]["step"] > found["verified"]
    assert code == 0
    assert len({tuple(end[1:]) for end in ends}) == 1
    assert [float(value) for value in ends[0][1:]] == pytest.approx(weights(), rel=1e-4)


@pytest.mark.parametrize("where", ["gradient", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_a_flipped_bit_of_a_gradient_or_an_optimizer_state_is_found(tmp_path: Path, where: str) -> None:
    code, _, events = launch(tmp_path, where)
    (found,) = events["digests_differ"]
    assert (found["ranks"], found["certain"], found["policy"]) == ([1], True, "report")
    assert STRUCK < found["step"] <= STRUCK + WITHIN
    assert "rank_failed" not in events
    assert code == 0


@pytest.mark.slow
def test_a_run_that_shall_stop_ends_as_failed(tmp_path: Path) -> None:
    code, ends, events = launch(tmp_path, "parameter", "--on-corruption", "stop")
    assert code == 1
    assert ends == []
    (verdict,) = events["verdict"]
    assert (verdict["verdict"], verdict["reason"].split(":")[0]) == ("failed", "silent corruption")


@pytest.mark.slow
def test_a_run_without_a_fault_says_nothing(tmp_path: Path) -> None:
    code, _, events = launch(tmp_path, "nowhere", "--on-corruption", "restore")
    assert code == 0
    assert "digests_differ" not in events
    assert events["step_verified"]
