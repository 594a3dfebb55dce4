"""A plain loop under Hugging Face's Accelerate; the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 2 examples/train_accelerate.py --epochs 3
    python examples/train_accelerate.py --epochs 3

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resilio_hpc.frameworks.accelerate import AcceleratedSteps  # <-


class Sine(Dataset):
    """A noisy sine; its noise is drawn each time."""

    def __init__(self, samples: int) -> None:
        self.x = torch.rand(samples, 1, generator=torch.Generator().manual_seed(0)) * 6 - 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number], torch.sin(self.x[number]) + 0.05 * torch.randn(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint every so many steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one step of the optimizer")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how much longer a batch takes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.LayerNorm(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    loader = DataLoader(Sine(args.samples), batch_size=8, shuffle=True, num_workers=args.workers)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    torch.manual_seed(1 + accelerator.process_index)

    steps = AcceleratedSteps(accelerator, loader, every=args.every)  # <-
    for _ in steps.epochs(args.epochs):  # <-
        for x, y in loader:
            time.sleep(args.step_seconds)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
