"""A small network under FSDP1 (FullyShardedDataParallel); the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 3 examples/train_fsdp1.py --steps 40
    torchrun --nproc-per-node 3 examples/train_fsdp1.py --steps 40

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same. A run of another number of
ranks, or with other flat parameters (--wrap), goes on from the same checkpoints.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, fsdp_state, rng_state, set_rng_state


class Block(nn.Module):
    """A feed-forward network, with a size that ranks do not share evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1, self.training)


WRAPS = {"blocks": {Block}, "linears": {nn.Linear}, "whole": set[type[nn.Module]]()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="save a checkpoint every so many steps")
    parser.add_argument("--wrap", choices=WRAPS, default="blocks", help="what has a flat parameter of its own")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest duration of a step")
    args = parser.parse_args()

    torch.set_num_threads(1)
    run = train.attach()  # <-
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 13), Block(13), Block(13), nn.Linear(13, 1))
    policy = ModuleWrapPolicy(WRAPS[args.wrap]) if WRAPS[args.wrap] else None
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    torch.manual_seed(1 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    def state() -> dict[str, object]:  # <-
        return {"training": fsdp_state(model, optimizer), "schedule": schedule, "random": rng_state()}

    start, checkpoint = 0, Checkpointer(run.checkpoint_dir)  # <-
    if restored := checkpoint.restore(state()):  # <-
        start = restored[0]
        set_rng_state(restored[1]["random"])

    for step in run.steps(start, args.steps, save=checkpoint.saver(state), every=args.every):  # <-
        began = time.monotonic()
        x = torch.rand(8, 1, generator=torch.Generator().manual_seed(step * run.world_size + run.rank)) * 6 - 3
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if run.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
