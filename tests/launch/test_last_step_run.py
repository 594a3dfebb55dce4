"""Under the real launcher: a failure costs the step that it interrupts, though nothing was saved before.

Ranks train as DDP does. Each step's sum over the weights is printed by rank 0: no step comes twice.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import Event, read_ledger
from tests.support.environments import scrubbed
from tests.support.launch.own_generators import drawn_after
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK = 9, 5
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

run = train.attach()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
torch.manual_seed(run.rank)
checkpoint = Checkpointer(layout=None if "own" in sys.argv[1] else REPLICATED)
state = lambda: {"model": model, "optimizer": optimizer, "random": rng_state()}
start, found = checkpoint.restore(state()) or (0, None)
if found is not None:
    set_rng_state(found["random"])

def strike(where, step):
    if where == sys.argv[1].partition(",")[0] and step == STRUCK and run.rank == 1 and run.restart_count == 0:
        if where == "raises":
            raise ValueError("planted")
        os.kill(os.getpid(), signal.SIGSTOP if where == "stopped" else signal.SIGKILL)

optimizer.register_step_post_hook(lambda *_: strike("in the optimizer", step))
for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    for where in ("killed", "raises", "stopped"):
        strike(where, step)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.03)
    if run.rank == 0:
        print("STEP", step, float(model.weight.sum()), flush=True)
print("END", run.rank, float(torch.rand(1)), float(model.weight.sum()), flush=True)
""".replace("STRUCK", str(STRUCK)).replace("STEPS", str(STEPS))


def launch(path: Path, where: str, *options: str) -> tuple[list[list[str]], list[Event]]:
    """Return the words of what the ranks printed, and what became of their last steps."""
    (path / "train.py").write_text(SCRIPT)
    argv = ["--run-dir", "run", "--nproc-per-node", "2", "--hang-timeout", "3", *options, "train.py", where]
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
        cwd=path, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    return lines, [event for event in read_ledger(path / "run" / "ledger") if event.kind in ("last_step", "first_step")]


@pytest.mark.parametrize(
    "where",
    [
        "killed",
        pytest.param("in the optimizer", marks=pytest.mark.slow),
        pytest.param("raises", marks=pytest.mark.slow),
        pytest.param("raises, own tensors", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.slow),
    ],
)
def test_a_failure_costs_the_step_that_it_interrupts(tmp_path: Path, where: str) -> None:
    lines, events = launch(tmp_path, where)
    (last,) = [event.fields for event in events if event.kind == "last_step"]
    finished = STRUCK + (where == "in the optimizer")
    found = last["step"], last["saved"], last["made"]
    assert found == ((finished, 2, []) if where.startswith("raises") else (finished, 1, [1]))
    first = [event.fields for event in events if event.kind == "first_step"][-1]
    assert (first["restored"], first["source"]) == (finished, "memory")
    steps = [int(line[1]) for line in lines if line[:1] == ["STEP"]]
    assert steps == list(range(STEPS))  # none twice
    ends = {int(line[1]): (float(line[2]), line[3]) for line in lines if line[:1] == ["END"]}
    assert {rank: end[0] for rank, end in ends.items()} == {
        rank: pytest.approx(drawn_after(rank, STEPS)) for rank in range(2)
    }
    assert len({weights for _, weights in ends.values()}) == 1
