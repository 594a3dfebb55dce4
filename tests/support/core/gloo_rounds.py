"""One of two ranks that leave their gloo groups and make others, in one process. Arguments: a directory, the rank.

In each round rank 0 waits in a collective that rank 1 does not enter. Prints what more there is after the last round
than after the first ones: groups, threads, descriptors.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.core import gloo_groups
from resilio_hpc.train import broken_communication

ROUNDS, FIRST = 8, 3
directory, rank = Path(sys.argv[1]), int(sys.argv[2])
counts: list[tuple[int, int]] = []
gloo_groups.keep_alive()
for number in range(ROUNDS):
    dist.init_process_group("gloo", init_method=f"file://{directory}/{number}", rank=rank, world_size=2)
    dist.new_group()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    if rank == 0:
        breaker = threading.Thread(target=lambda: (time.sleep(0.02), broken_communication.break_all({})))
        breaker.start()
        try:
            dist.all_reduce(torch.ones(1))
            print("no error")
        except RuntimeError:
            pass
        breaker.join()
    else:
        time.sleep(0.04)
        broken_communication.break_all({})
    broken_communication.leave_groups()
    del model
    gc.collect()
    left = gloo_groups.free()
    counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))  # noqa: PTH208
(threads, descriptors), (first_threads, first_descriptors) = counts[-1], counts[FIRST]
print("left", left, "threads", threads - first_threads, "descriptors", descriptors - first_descriptors)
