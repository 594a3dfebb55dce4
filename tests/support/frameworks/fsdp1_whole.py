"""Run a script under FSDP1; at its end, write what torch gathers of all ranks: fsdp1_whole.py FILE SCRIPT [WORD…]."""

from __future__ import annotations

import gc
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.ckpt.fsdp1_layouts import gathered


def main() -> None:
    """Run it. It ends with its process group."""
    target, end = sys.argv[1], dist.destroy_process_group

    def write_and_end() -> None:
        objects = gc.get_objects()
        models = [one for one in objects if type(one) is FullyShardedDataParallel]
        model = max(models, key=lambda one: sum(1 for _ in one.modules()))  # the outermost
        (optimizer,) = (one for one in objects if isinstance(one, torch.optim.Optimizer))
        whole = gathered(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, target)
        end()

    dist.destroy_process_group = write_and_end
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
