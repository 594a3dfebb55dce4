"""Trains a matrix that tensor and pipeline parallel ranks divide, in the layout that the launcher gives each round.

``python planned_training.py OUT``: until a file OUT.end appears; then it writes matrix and number of steps to OUT.
Whole numbers, so that no layout changes a bit of the result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, Slab

SIZE, BATCH, STEP_S = 12, 48, 0.05
ROWS, COLUMNS = np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")


def gradient(sample: int) -> NDArray[np.int64]:
    """What a sample adds to the whole matrix."""
    return np.asarray((sample * (ROWS + 1) + COLUMNS) % 11, dtype=np.int64)


def expected(steps: int) -> list[list[int]]:
    """The matrix after so many steps of a run that was never disturbed."""
    total = np.zeros((SIZE, SIZE), dtype=np.int64)
    for sample in range(steps * BATCH):
        total += gradient(sample)
    return [[int(value) for value in row] for row in total]


def main(out: Path) -> None:
    from resilio_hpc.drills.script.worlds import world_of

    run = train.attach()
    world = world_of(run.rank, run.world_size, with_torch=False)
    tensor = run.rank % run.tensor_parallel
    stage = run.rank // (run.tensor_parallel * run.data_parallel)
    rows, columns = SIZE // run.pipeline_parallel, SIZE // run.tensor_parallel
    box = np.s_[stage * rows : (stage + 1) * rows, tensor * columns : (tensor + 1) * columns]
    own = np.zeros((rows, columns), dtype=np.int64)
    part = Slab(own, (SIZE, SIZE), (stage * rows, tensor * columns), run.data_parallel_rank, run.data_parallel)
    plan = train.keep_batch(BATCH, run.micro_batch, run.data_parallel)
    state = {"matrix": part}
    checkpoint = Checkpointer(run.checkpoint_dir)
    restored = checkpoint.restore(state)
    start = step = restored[0] if restored else 0
    for step in run.steps(start, 1_000_000, lambda done: checkpoint.save(done, state), every=5):
        whole = np.zeros((SIZE, SIZE), dtype=np.int64)
        for micro in plan.micro_batches(step * BATCH, run.data_parallel_rank):
            for sample in micro:
                whole[box] += gradient(sample)[box]
        ending = int(run.rank == 0 and out.with_suffix(".end").exists())
        total = world.sum(np.concatenate([whole.ravel(), [ending]]))
        own += total[:-1].reshape(SIZE, SIZE)[box]
        time.sleep(STEP_S)
        if total[-1]:
            break
    checkpoint.save(step + 1, state).wait("committed")
    whole = np.zeros((SIZE, SIZE), dtype=np.int64)
    if run.data_parallel_rank == 0:
        whole[box] = own
    matrix = world.sum(whole.ravel()).reshape(SIZE, SIZE)
    if run.rank == 0:
        out.write_text(json.dumps({"matrix": matrix.tolist(), "steps": step + 1}))
    run.finish(step + 1)
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
