"""A script of PyTorch-Ignite without a line of ours: it keeps a file for each epoch, and goes on from the newest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.rand(256, 1) * 6 - 3
data = TensorDataset(x, torch.sin(x))
sampler: DistributedSampler[int] = DistributedSampler(data)  # type: ignore[arg-type]
loader = DataLoader(data, batch_size=8, sampler=sampler)  # type: ignore[arg-type, var-annotated]
trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
objects = {"trainer": trainer, "model": model, "optimizer": optimizer}
files = DiskSaver("files", require_empty=False)
keeper = Checkpoint(objects, files, n_saved=2, global_step_transform=global_step_from_engine(trainer))
trainer.add_event_handler(Events.EPOCH_COMPLETED, keeper)


@trainer.on(Events.EPOCH_STARTED)
def shuffle(engine: Engine) -> None:
    sampler.set_epoch(engine.state.epoch)


@trainer.on(Events.EPOCH_COMPLETED)
def meet() -> None:
    torch.distributed.barrier()  # no rank runs ahead of the file


saved = sorted(Path("files").glob("*.pt"), key=lambda path: path.stat().st_mtime)
if saved:
    Checkpoint.load_objects(objects, checkpoint=torch.load(saved[-1], weights_only=True))
if os.environ["RANK"] == "0":
    print("BEGAN", trainer.state.epoch, flush=True)
torch.distributed.barrier()
trainer.run(loader, max_epochs=int(sys.argv[1]))
torch.distributed.destroy_process_group()
