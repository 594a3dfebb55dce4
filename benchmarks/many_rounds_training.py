"""Two ranks for benchmarks/many_rounds.py: rank 1 is killed after a few steps of each round, and rank 0 lives on."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

FIRST, STEPS, STEP_S = 250, 5, 0.02  # steps of the first round, in which the first save is committed; of each other one
run = train.attach()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint = Checkpointer(layout=REPLICATED)


@train.restartable
def main() -> None:
    dist.init_process_group("gloo")
    state = {"model": model, "optimizer": optimizer}
    start, _ = checkpoint.restore(state) or (0, None)
    parallel = DistributedDataParallel(model, init_sync=start == 0)
    if run.rank == 0:
        with (Path(os.environ["OUT"]) / "rounds").open("a") as file:
            file.write(f"{run.round} {os.getpid()}\n")
    for step in run.steps(start, 10_000_000, save=checkpoint.saver(state), every=50):
        if run.rank == 1 and step - start == (STEPS if start else FIRST):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        parallel(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_S)


main()
