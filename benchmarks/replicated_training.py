"""What ``last_step.py`` has trained: ranks with the same tensors, each with its own generators. Run by the launcher.

Each rank writes down the steps that it has finished. At the end rank 0 writes digests of the weights, and what each
rank's generator gives next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state


def main() -> None:
    options = _options()
    run = train.attach()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, options.width), torch.nn.Tanh(), torch.nn.Linear(options.width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    made = model, optimizer, schedule, Checkpointer(layout=REPLICATED)
    if options.in_process:
        train.restartable(work)(options, run, made)
    else:
        work(options, run, made)


def work(options: argparse.Namespace, run: train.Run, made: tuple[Any, Any, Any, Checkpointer]) -> None:
    """Train; with --in-process it is entered again by the ranks that live."""
    model, optimizer, schedule, checkpoint = made
    dist.init_process_group("gloo", timeout=run.collective_timeout)
    torch.manual_seed(1 + run.rank)

    def state() -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "random": rng_state()}

    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    options.stamps.mkdir(parents=True, exist_ok=True)
    stamps = os.open(options.stamps / f"{run.round}.{run.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begun = False
    for step in run.steps(start, options.steps, save=checkpoint.saver(state), every=options.every):
        if not begun:
            begun = True
            (options.stamps / f"begun-{run.round}-{run.rank}").write_text(f"{time.time()}\n")
        optimizer.zero_grad()
        time.sleep(options.work_s)
        model(torch.randn(16, 64)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        ends = torch.tensor([int(options.enough.exists())])
        dist.all_reduce(ends)
        optimizer.step()
        schedule.step()
        os.write(stamps, f"{step + 1}\n".encode())
        time.sleep(options.step_s)
        if ends.item():
            run.step_done(step + 1)
            run.finish(step + 1)
            break
    draws = [torch.zeros(1) for _ in range(run.world_size)]
    dist.all_gather(draws, torch.rand(1))
    if run.rank == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        ended = {"steps": step + 1, "weights": hashlib.sha256(weights).hexdigest(), "draws": torch.cat(draws).tolist()}
        options.result.write_text(json.dumps(ended))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--step-s", type=float, default=0.05, help="after the optimizer's step")
    parser.add_argument("--work-s", type=float, default=0.0, help="before gradients are summed")
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
    parser.add_argument("--in-process", action="store_true", help="ranks that live enter again in their processes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
