"""Data-parallel training for benchmarks/device_recovery.py: each rank keeps a state of its own on a device.

The device is a process that ends with its rank (``ckpt.devices.process_device``). What it holds is another content on
each rank, and decides the rank's batches. At one step a rank kills itself, or its device (``strike``). Lines of
standard output say when, and what each rank ended with.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state
from resilio_hpc.ckpt.devices.logged_state import LoggedState
from resilio_hpc.ckpt.devices.process_device import zeros
from resilio_hpc.ckpt.devices.process_session import DeviceSession

STEPS, STRUCK, WHAT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WHO = 1
run = train.attach()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
checkpoint = Checkpointer(layout=REPLICATED)
session = DeviceSession(Path(os.environ["RESILIO_ARENA_DIR"]), f"device-rank{run.rank}")
residual = zeros(session, (16, 16))
logged = LoggedState(session, {"residual": residual})


def say(*words: object) -> None:
    print("|".join(map(str, words)), flush=True)


def strike(step: int) -> None:
    if step != STRUCK or run.rank != WHO or run.restart_count:
        return
    say("STRUCK", time.time())
    if WHAT == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "device":
        os.kill(session.pid, signal.SIGKILL)


def state() -> dict[str, object]:
    return {"model": model, "optimizer": optimizer, "random": rng_state(), "device": logged}


@train.restartable
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(run.rank)
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
        say("RESTORED", run.rank, start, logged.source, session.rebuilds, os.getpid())
    parallel = DistributedDataParallel(model)  # after the restore: it writes to the parameters
    train.warm_up_ddp(parallel, lambda: parallel(torch.ones(16, 16)).square().mean().backward())
    first = True
    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=1000):
        optimizer.zero_grad()
        noise = zeros(session, (16, 16)).set_normal(1000 * step + run.rank)
        residual.set_sum(noise, residual, 0.9)
        residual.set_matmul(noise.set_scaled(residual, 0.1), residual.detach().clone())
        strike(step)
        batch = torch.randn(16, 16) + 0.1 * residual.fetch()
        parallel(batch).square().mean().backward()
        optimizer.step()
        if first and run.restart_count:
            say("AGAIN", run.rank, time.time())
        first = False
    weights = [parameter.detach().double().sum().item().hex() for parameter in model.parameters()]
    say("END", run.rank, *weights, residual.fetch().double().sum().item().hex(), float(torch.rand(1)).hex())
    dist.destroy_process_group()


main()
session.close()
