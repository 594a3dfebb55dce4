"""python gloo_lives.py DIRECTORY LIVES: forks four ranks of a DDP script again and again; prints how many lives end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.core.gloo_groups import keep_alive

RANKS, LIMIT_S = 4, 20.0


def train(store: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=0.0001)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def live(store: Path) -> bool:
    """Whether all ranks of one life ended in time."""
    store.unlink(missing_ok=True)
    left = set()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            train(store, rank)
            os._exit(0)
        left.add(pid)
    ranks, deadline = set(left), time.monotonic() + LIMIT_S
    while left and time.monotonic() < deadline:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return bool(ranks) and not left


if __name__ == "__main__":
    keep_alive()
    ended = 0
    while ended < int(sys.argv[2]) and live(Path(sys.argv[1]) / "store"):
        ended += 1
    print(ended)
