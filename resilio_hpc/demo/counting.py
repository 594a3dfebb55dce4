"""The job that fault drills use: counts in a way that any lost, doubled or torn step would spoil.

Every rank keeps a vector; in each step the ranks' vectors are summed over the whole world and mixed with the step's
number. The final vector is a pure function of the number of steps and ranks (``expected``), so the test of a recovery
is exact. Run as a script by resilio-launch; imports torch only then.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

MODULUS = 1_000_003


def expected(steps: int, world_size: int) -> int:
    """The value that every element must have after ``steps`` steps of ``world_size`` ranks."""
    value = 1
    for step in range(steps):
        value = (value * world_size * 3 + step) % MODULUS
    return value


def main() -> None:
    """Train, with the mistakes that the arguments ask for, in the first round only."""
    import torch
    import torch.distributed as dist

    from resilio_hpc import ckpt, train

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--exit-at", type=int, default=-1)
    options = parser.parse_args()
    run = train.attach()
    dist.init_process_group("gloo")
    state = {"vector": torch.ones(1000, dtype=torch.int64)}
    checkpointer = ckpt.Checkpointer(layout=ckpt.REPLICATED)
    restored = checkpointer.restore(state)
    start = restored[0] if restored else 0
    first_life = run.round == 0 and run.rank == 1
    for step in run.steps(start, options.steps, save=lambda done: checkpointer.save(done, state), every=options.every):
        if first_life and step == options.raise_at:
            raise RuntimeError(f"planted in step {step}")
        if first_life and step == options.exit_at:
            os._exit(0)
        total = state["vector"].clone()
        dist.all_reduce(total)
        state["vector"].copy_((total * 3 + step) % MODULUS)
        time.sleep(options.step_seconds)
    if run.rank == 0:
        values = sorted(set(state["vector"].tolist()))
        options.result.write_text(json.dumps({"values": values, "world_size": run.world_size, "steps": options.steps}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
