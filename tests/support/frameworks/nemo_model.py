"""A model of NVIDIA NeMo, trained by its own optimizer and schedule: nemo_model.py EPOCHS."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from nemo.core import ModelPT
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from resilio_hpc.frameworks.lightning import ResilioCallback


class Sine(ModelPT):
    """A network with dropout that learns a sine."""

    def __init__(self, cfg: Any, trainer: Any) -> None:
        super().__init__(cfg, trainer)
        layers = torch.nn.Linear(1, 32), torch.nn.LayerNorm(32), torch.nn.Tanh(), torch.nn.Dropout(0.1)
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))

    def setup_training_data(self, train_data_config: Any) -> None:
        x = torch.rand(train_data_config.samples, 1, generator=torch.Generator().manual_seed(0)) * 6 - 3
        self._train_dl = DataLoader(TensorDataset(x, torch.sin(x)), train_data_config.batch_size, shuffle=True)

    def setup_validation_data(self, val_data_config: Any) -> None:
        """There is none."""

    @classmethod
    def list_available_models(cls) -> list[Any]:
        return []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    pl.seed_everything(1 + int(os.environ["RANK"]))
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=int(sys.argv[1]),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ResilioCallback(every=1000)],
    )  # fmt: skip
    exp_manager(trainer, {"exp_dir": "nemo", "create_tensorboard_logger": False, "create_checkpoint_callback": False})
    schedule = {"name": "CosineAnnealing", "warmup_steps": 5, "min_lr": 1e-4}
    optim = {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.98], "sched": schedule}
    model = Sine(OmegaConf.create({"train_ds": {"samples": 256, "batch_size": 8}, "optim": optim}), trainer)
    trainer.fit(model)


if __name__ == "__main__":
    main()
