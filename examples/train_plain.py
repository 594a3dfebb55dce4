"""A plain torchrun script: no import of ours, its own checkpoint. Runs the same under torchrun and resilio-launch.

torchrun --nproc-per-node 2 examples/train_plain.py --steps 200 --checkpoint /tmp/plain.pt
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint, so that there is always a whole one."""
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.rename(path)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a step: a noisy sine, drawn from (step, rank) alone."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.rand(32, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.05 * torch.randn(32, 1, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="save a checkpoint every so many steps")
    parser.add_argument("--checkpoint", type=Path, default=Path("plain.pt"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    start = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    if rank == 0:
        print(f"{os.environ['WORLD_SIZE']} ranks, from step {start}", flush=True)

    for step in range(start, args.steps):
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            if rank == 0:
                save(args.checkpoint, step + 1, model, optimizer)
                print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
            dist.barrier()  # no rank runs ahead of the checkpoint
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
