"""A loop of its own over two epochs of 96 samples, whose ranks append the samples they have trained with to "seen"."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from resilio_hpc.ckpt import REPLICATED
from resilio_hpc.frameworks.epoch_steps import EpochSteps

SAMPLES, EPOCHS = 96, 2


class Counted(EpochSteps):
    """Each batch is a step."""

    def parts(self) -> dict[str, Any]:
        """There is nothing to train."""
        return {"steps": self}

    def _has_stepped(self) -> bool:
        return True


def main() -> None:
    """Train as many ranks as there are; wait before a step, so that a stop finds it under way."""
    dist.init_process_group("gloo")
    sampler: DistributedSampler[int] = DistributedSampler(range(SAMPLES), shuffle=True)  # type: ignore[arg-type]
    loader = DataLoader(range(SAMPLES), batch_size=2, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    steps = Counted(loader, 0, None, REPLICATED, {})
    for epoch in steps.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            if steps.completed == 5 and dist.get_world_size() == 4:
                Path("struck").touch()
                while not Path("go on").exists():
                    time.sleep(0.01)
            dist.all_reduce(torch.zeros(1))
            with Path(f"seen-{epoch}").open("a") as file:
                os.write(file.fileno(), "".join(f"{sample}\n" for sample in batch.tolist()).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
