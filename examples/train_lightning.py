"""A small LightningModule; the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 2 examples/train_lightning.py --epochs 4
    python examples/train_lightning.py --epochs 4

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same.
"""

import argparse
import os
import time

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilio_hpc.frameworks.lightning import ResilioCallback  # <-


class Sine(pl.LightningModule):
    """A network with dropout that learns a noisy sine."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.net = nn.Sequential(
            nn.Linear(1, 32),
            nn.LayerNorm(32),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 1),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(self.args.step_seconds)
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x + 0.01 * torch.randn_like(x)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 1, generator=generator) * 6 - 3
    return TensorDataset(x, torch.sin(x) + 0.05 * torch.randn(samples, 1, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint every so many steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one step of the optimizer")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--persistent", action="store_true", help="keep these processes from epoch to epoch")
    parser.add_argument("--stateful", action="store_true", help="use torchdata's StatefulDataLoader")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how much longer a batch takes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    pl.seed_everything(1 + int(os.environ.get("RANK", "0")))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if "RANK" in os.environ else "auto",
        max_epochs=args.epochs, accumulate_grad_batches=args.accumulate, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ResilioCallback(every=args.every)],  # <-
    )  # fmt: skip
    module = Sine(args)
    kind = DataLoader
    if args.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    loader = kind(
        data(args.samples, 0), batch_size=8, shuffle=True, num_workers=args.workers, persistent_workers=args.persistent
    )
    trainer.fit(module, loader, DataLoader(data(64, 1), batch_size=8))


if __name__ == "__main__":
    main()
