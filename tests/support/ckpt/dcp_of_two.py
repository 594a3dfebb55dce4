"""Two processes save a model and its optimizer under FSDP as a DCP folder: run by test_import.

argv: a directory, which gets ``dcp`` and, with the same tensors whole, ``whole.pt``.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from resilio_hpc.core.gloo_groups import keep_alive


def live(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.rand(8, 12)).square().mean().backward()
    optimizer.step()
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**parts, "epoch": 3, "rates": [0.5, 0.25]}, checkpoint_id=directory / "dcp")
    everything = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(dict(zip(("model", "optimizer"), everything, strict=True)), directory / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    keep_alive()
    child = os.fork()
    live(1 if child == 0 else 0, Path(sys.argv[1]))
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
