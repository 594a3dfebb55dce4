"""A trainer of PyTorch-Ignite; the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 2 examples/train_ignite.py --epochs 3
    python examples/train_ignite.py --epochs 3

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same.
"""

import argparse
import os
import time

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from resilio_hpc.frameworks.ignite import make_resilient  # <-


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
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 32), nn.LayerNorm(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    data, sampler = Sine(args.samples), None
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model, sampler = DistributedDataParallel(model), DistributedSampler(data)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    loader = DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler, num_workers=args.workers)
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=args.accumulate
    )
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(nn.functional.mse_loss)})

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        if sampler is not None:
            sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.ITERATION_COMPLETED)
    def go_on(engine: Engine) -> None:
        schedule.step()
        time.sleep(args.step_seconds)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        found = evaluator.run(DataLoader(data, batch_size=64)).metrics
        print(f"epoch {engine.state.epoch} loss {found['loss']:.4f}", flush=True)

    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    make_resilient(trainer, objects, every=args.every, evaluators=[evaluator])  # <-
    trainer.run(loader, max_epochs=args.epochs)


if __name__ == "__main__":
    main()
