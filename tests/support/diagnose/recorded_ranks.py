"""Ranks over gloo that hang, and write dumps of PyTorch's flight recorder: recorded_ranks.py DIRECTORY HOW."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C import _distributed_c10d

WORLD = 4


def wait_for(directory: Path, names: str) -> None:
    while len(list(directory.glob(names))) < WORLD:
        time.sleep(0.05)


def dump_and_end(directory: Path, rank: int) -> None:
    """Write a dump once all ranks are where they stay: pickles on even ranks, JSON on odd ones. End with the others."""
    (directory / f"there_{rank}").touch()
    wait_for(directory, "there_*")
    time.sleep(1.0)  # the last call is entered after the file
    recorder = _distributed_c10d
    made = directory / f"made_{rank}"
    made.write_bytes(recorder._dump_fr_trace_json() if rank % 2 else recorder._dump_fr_trace())
    made.rename(directory / f"nccl_trace_rank_{rank}")
    wait_for(directory, "nccl_trace_rank_*")
    os._exit(0)


def main(rank: int, directory: Path, how: str) -> None:
    """Train one step, then hang."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=300))
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(8))
    if rank in (0, 1):
        dist.all_reduce(torch.ones(4), group=pair)
    threading.Thread(target=dump_and_end, args=(directory, rank)).start()
    if how == "absent" and rank == 1:
        return
    if how == "absent" and rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)  # rank 1 never comes; ranks 2 and 3 wait for this one
    if how == "mismatch" and rank == 3:
        dist.barrier()
    dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    mp.spawn(main, args=(Path(sys.argv[1]), sys.argv[2]), nprocs=WORLD)
