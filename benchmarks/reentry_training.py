"""Data-parallel training for benchmarks/in_process.py: replicated state, and a function that is entered again.

Each rank appends ``step unix_time round`` lines to ``$OUT/steps-rank<R>``, and to ``$OUT/phases-rank<R>`` the times of
an entry: of the function's begin, and when groups, restore, DDP and the first step were done. Where the model is made
``inside`` of the function, it is made again with each entry; ``outside``, it is kept. The third argument: seconds of
work before the function, as the making of an index of samples.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

MEGABYTES, WHERE, STEP_S = float(sys.argv[1]), sys.argv[2], 0.05
run = train.attach()


class Model(nn.Module):
    """A small trained part, and a large one that is part of the state and is not trained: steps take no time for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(64, 64)
        count = int(MEGABYTES * 1e6 / 4 / 8)
        self.large = nn.ParameterList([nn.Parameter(torch.ones(count), requires_grad=False) for _ in range(8)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.trained(batch)


def make() -> tuple[Model, torch.optim.Optimizer, Checkpointer]:
    model = Model()
    return model, torch.optim.AdamW(model.trained.parameters(), lr=1e-3), Checkpointer(layout=REPLICATED)


until = time.monotonic() + float(sys.argv[3] if len(sys.argv) > 3 else 0.0)
index = torch.empty(0)
while time.monotonic() < until:
    index = torch.randperm(1_000_000)

kept = make() if WHERE == "outside" else None


@train.restartable
def main() -> None:
    times = [time.time()]
    dist.init_process_group("gloo")
    times.append(time.time())
    model, optimizer, checkpoint = kept or make()
    state = {"model": model, "optimizer": optimizer}
    start, _ = checkpoint.restore(state) or (0, None)
    times.append(time.time())
    parallel = DistributedDataParallel(model, init_sync=False)  # all ranks have the same already
    times.append(time.time())
    with (Path(os.environ["OUT"]) / f"steps-rank{run.rank}").open("ab", buffering=0) as stamps:
        for step in run.steps(start, 1_000_000, save=checkpoint.saver(state), every=1000):
            began = time.monotonic()
            optimizer.zero_grad()
            parallel(torch.full((8, 64), float(step % 7))).square().mean().backward()
            optimizer.step()
            stamps.write(f"{step + 1} {time.time():.6f} {run.round}\n".encode())
            if step == start:
                with (Path(os.environ["OUT"]) / f"phases-rank{run.rank}").open("a") as phases:
                    phases.write(" ".join(f"{at:.6f}" for at in (run.round, *times, time.time())) + "\n")
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))


main()
