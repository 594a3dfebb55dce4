"""Under the real launcher: a killed rank of a model that is sharded and replicated (HSDP) costs the interrupted step.

Its part of the model lies in the memory of the rank with the same part: on its node, or on another one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.launch.own_generators import drawn_after
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK = 40, 35
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, rng_state, set_rng_state

run = train.attach()
checkpoint = Checkpointer()

@train.restartable
def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(run.rank)
    state = lambda: {"model": model, "optimizer": optimizer, "random": rng_state()}
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=10):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if step == STRUCK and run.rank == 1 and run.restart_count == 0 and "killed" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
        if run.rank == 0:
            print("STEP", step, flush=True)
    whole = [parameter.full_tensor().sum().item() for parameter in model.parameters()]
    print("END", run.rank, float(torch.rand(1)), *whole, flush=True)

main()
""".replace("STRUCK", str(STRUCK)).replace("STEPS", str(STEPS))


def launch(path: Path, where: str, nodes: int) -> tuple[list[int], dict[int, list[str]], list[dict[str, Any]]]:
    """Steps that rank 0 did, what ranks had at the end, and the first steps of each round."""
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    argv = ["--run-dir", "run", "--nproc-per-node", str(4 // nodes), "train.py", where]
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
        cwd=path, env=scrubbed(RESILIO_LOCAL_NODES=str(nodes)), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    first = [event.fields for event in read_ledger(path / "run" / "ledger") if event.kind == "first_step"]
    ends = {int(line[1]): line[2:] for line in lines if line[:1] == ["END"]}
    return [int(line[1]) for line in lines if line[:1] == ["STEP"]], ends, first


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_ranks_part_is_another_ranks(tmp_path: Path, nodes: int) -> None:
    steps, ends, first = launch(tmp_path / "struck", "killed", nodes)
    assert (first[-1]["restored"], first[-1]["source"]) == (STRUCK, "memory")
    assert steps == list(range(STEPS))  # none twice
    assert [float(ends[rank][0]) for rank in range(4)] == [pytest.approx(drawn_after(rank, STEPS)) for rank in range(4)]
    assert ends == launch(tmp_path / "calm", "calm", nodes)[1]
