"""Lives of a small DDP run, each with ranks of its own: forked from one process that has imported torch, for speed.

python resume_lives.py DIRECTORY SCENARIO…      prints one JSON line: {scenario: hash of the final state}
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import numpy
import torch
import torch._dynamo  # which the first optimizer of every rank would import
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.core.gloo_groups import keep_alive
from resilio_hpc.train import warm_up_ddp

RANKS, STEPS, STOP_AT = 4, 6, 3
OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
PASSES = {"plain": 1, "static": 2, "view": 1, "unused": 0}


class Net(nn.Module):
    """Modules are used in another order than they are registered in, as in most real models."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(48, 10)
        self.first = nn.Linear(32, 64)
        self.third = nn.Linear(64, 48)
        self.second = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(functional.dropout(x, 0.1, self.training))))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 32, generator=generator) + random.random() + numpy.random.rand()
    return functional.cross_entropy(model(x), torch.randint(10, (16,), generator=generator))


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for state in (model.state_dict(), *optimizer.state.values()):
        for name in sorted(state):
            digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


def life(directory: Path, rank: int, options: str, first: int, last: int, warm: bool) -> None:
    """Steps ``first`` … ``last - 1`` of one rank, from the state that the life before left."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    module = Net()
    model = DistributedDataParallel(module, bucket_cap_mb=0.01, **OPTIONS[options])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    path = directory / f"state{rank}"
    if first:
        state = torch.load(path, weights_only=False)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
    if warm:
        passes = warm_up_ddp(model, lambda: loss_of(model, 99, rank).backward())
        assert passes == PASSES[options], passes
        assert warm_up_ddp(model, lambda: None) == 0, "a second warm-up has nothing to do"
        assert all(parameter.grad is None for parameter in model.parameters())
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    if first == 0 and last == STEPS and not OPTIONS[options].get("find_unused_parameters"):
        assert model._get_ddp_logging_data()["rebuilt_bucket_sizes"].count(",") >= 2, "wants three buckets or more"
    torch.save(
        {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
        },
        path,
    )
    (directory / f"hash{rank}").write_text(state_hash(module, optimizer))
    dist.barrier()
    dist.destroy_process_group()


def run_life(directory: Path, options: str, first: int, last: int, warm: bool) -> str:
    """All ranks of one life; the hash of rank 0's final state."""
    (directory / "store").unlink(missing_ok=True)
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                life(directory, rank, options, first, last, warm)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit(f"{len(failed)} of {RANKS} ranks failed: {options} {first} {last} {warm}")
    return (directory / "hash0").read_text()


def main() -> NoReturn:
    keep_alive()
    gc.freeze()  # children need not look at it again
    directory = Path(sys.argv[1])
    results = {}
    for scenario in sys.argv[2:]:
        options, undisturbed, warm = scenario.split("-")
        if undisturbed == "undisturbed":
            results[scenario] = run_life(directory, options, 0, STEPS, warm == "warm")
        else:
            run_life(directory, options, 0, STOP_AT, warm == "warm")
            results[scenario] = run_life(directory, options, STOP_AT, STEPS, warm == "warm")
    print(json.dumps(results), flush=True)
    os._exit(0)  # taking torch apart takes seconds


if __name__ == "__main__":
    main()
