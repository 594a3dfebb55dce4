"""Trains with whole numbers, so that every sum is exact: parameters do not depend on how ranks shared the samples.

``python resized_training.py OUT keep|scale``: until a file OUT.end appears; then it writes how often each sample was
used, the parameters, the number of steps and of samples to OUT. The global batch is kept, or scaled with the ranks.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

SAMPLES, BATCH, MICRO, PASS_S = 240, 12, 2, 0.05
REFERENCE_RANKS = 2  # scaled: so many have the whole batch


def main(out: Path, rule: str) -> None:
    run = train.attach()
    dist.init_process_group("gloo")
    if rule == "scale":
        plan = train.scale_batch(BATCH, MICRO, run.data_parallel, REFERENCE_RANKS)
    else:
        plan = train.keep_batch(BATCH, MICRO, run.data_parallel)
    order = train.SampleOrder(SAMPLES, seed=3)
    position = torch.zeros(1, dtype=torch.int64)  # samples so far; with a kept batch step * BATCH
    used_so_far = torch.zeros(SAMPLES, dtype=torch.float64)
    state = {"weights": torch.zeros(4, dtype=torch.float64), "used": used_so_far, "position": position}
    checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
    restored = checkpoint.restore(state)
    start = step = restored[0] if restored else 0
    for step in run.steps(start, 1_000_000, lambda done: checkpoint.save(done, state), every=10):
        gradient, used = torch.zeros(4, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.float64)
        for micro in plan.micro_batches(int(position), run.data_parallel_rank):
            for sample in order.samples(micro):
                gradient += torch.tensor([1.0, sample, sample % 7, step], dtype=torch.float64)
                used[sample] += 1
        dist.all_reduce(gradient)
        dist.all_reduce(used)
        state["weights"] += gradient * (1 + step % 3)
        state["used"] += used
        position += plan.global_batch
        time.sleep(PASS_S * plan.accumulation)
        ending = torch.tensor(float(run.rank == 0 and out.with_suffix(".end").exists()))
        dist.all_reduce(ending)
        if ending:
            break
    checkpoint.save(step + 1, state).wait("committed")
    if run.rank == 0:
        result = {name: value.tolist() for name, value in state.items()} | {"steps": step + 1}
        out.write_text(json.dumps(result))
    run.finish(step + 1)
    dist.destroy_process_group()


def uses(samples: int) -> list[int]:
    """How often each sample is among the first so many."""
    order, used = train.SampleOrder(SAMPLES, seed=3), [0] * SAMPLES
    for sample in order.samples(range(samples)):
        used[sample] += 1
    return used


def expected(steps: int) -> dict[str, list[float]]:
    """What one rank that is never disturbed ends with, with a kept batch."""
    order, weights, used = train.SampleOrder(SAMPLES, seed=3), [0.0] * 4, [0.0] * SAMPLES
    for step in range(steps):
        for sample in order.samples(range(step * BATCH, (step + 1) * BATCH)):
            values = (1.0, sample, sample % 7, step)
            weights = [weight + value * (1 + step % 3) for weight, value in zip(weights, values, strict=True)]
            used[sample] += 1
    return {"weights": weights, "used": used}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
