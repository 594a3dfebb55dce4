"""python gloo_lives.py DIRECTORY LIVES: forks four ranks of a DDP script again and again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.core.gloo_groups import keep_alive
from tests.support.waiting import until

RANKS = 4


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


def live(store: Path) -> None:
    """One life. Raises AssertionError where ranks do not end."""
    store.unlink(missing_ok=True)
    left: set[int] = set()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            train(store, rank)
            os._exit(0)
        left.add(pid)

    def over() -> bool:
        left.difference_update([pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]])
        return not left

    try:
        until(over, "the end of all ranks", lambda: left, poll_s=0.005)
    finally:
        for pid in left:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    keep_alive()
    for _ in range(int(sys.argv[2])):
        live(Path(sys.argv[1]) / "store")
    print("all have ended")
