"""Trains with whole numbers, so that every sum is exact: parameters do not depend on how ranks shared the samples.

``python resized_training.py OUT keep|scale``: until a file OUT.end appears; then it writes how often each sample was
used, the parameters, the number of steps and of samples to OUT. The global batch is kept, or scaled with the ranks.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

SAMPLES, BATCH, MICRO, PASS_S = 240, 12, 2, 0.05
REFERENCE_RANKS = 2  # scaled: so many have the whole batch


def main(out: Path, rule: str) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    from resilio_hpc.drills.script.worlds import world_of

    run = train.attach()
    world = world_of(run.rank, run.world_size, with_torch=False)
    if rule == "scale":
        plan = train.scale_batch(BATCH, MICRO, run.data_parallel, REFERENCE_RANKS)
    else:
        plan = train.keep_batch(BATCH, MICRO, run.data_parallel)
    order = train.SampleOrder(SAMPLES, seed=3)
    position = np.zeros(1, dtype=np.int64)  # samples so far; with a kept batch step * BATCH
    state = {"weights": np.zeros(4, dtype=np.int64), "used": np.zeros(SAMPLES, dtype=np.int64), "position": position}
    checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
    restored = checkpoint.restore(state)
    start = step = restored[0] if restored else 0
    for step in run.steps(start, 1_000_000, lambda done: checkpoint.save(done, state), every=10):
        gradient, used = np.zeros(4, dtype=np.int64), np.zeros(SAMPLES, dtype=np.int64)
        for micro in plan.micro_batches(int(state["position"][0]), run.data_parallel_rank):
            for sample in order.samples(micro):
                gradient += np.array([1, sample, sample % 7, step])
                used[sample] += 1
        ending = int(run.rank == 0 and out.with_suffix(".end").exists())
        total = world.sum(np.concatenate([gradient, used, [ending]]))
        state["weights"] += total[:4] * (1 + step % 3)
        state["used"] += total[4:-1]
        state["position"] += plan.global_batch
        time.sleep(PASS_S * plan.accumulation)
        if total[-1]:
            break
    checkpoint.save(step + 1, state).wait("committed")
    if run.rank == 0:
        result = {name: value.tolist() for name, value in state.items()} | {"steps": step + 1}
        out.write_text(json.dumps(result))
    run.finish(step + 1)
    world.close()


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
