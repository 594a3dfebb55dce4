"""One training of ``benchmarks/frameworks.py``, under torchrun: saves of ours beside those of the framework, in turn.

framework_saves.py FRAMEWORK MEGABYTES REPEATS DIRECTORY

Rank 0 prints a line of JSON for each save: its method, and for how long the slowest rank was blocked. Before each save
all ranks meet, and nothing of the save before is being written any more.
"""

import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

Save = Callable[[int], Any]  # returns what has to be waited for, outside of the measured time, if anything
WIDTH = 1024


class Random(Dataset[Any]):
    """Inputs without meaning. A model of Hugging Face's Trainer takes them by name."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        return {"x": torch.ones(WIDTH)}


class Layers(nn.Module):
    """So many layers that they and AdamW's moments have ``megabytes``."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Measured:
    """The saves of one training, by method."""

    def __init__(self, directory: Path, repeats: int, methods: dict[str, Save]) -> None:
        self._directory, self._repeats, self._methods = directory, repeats, methods

    def run(self) -> None:
        """Save by each method in turn; the first round warms them up."""
        for number in range(self._repeats + 1):
            for name, save in self._methods.items():
                dist.barrier()
                begun = time.perf_counter()
                waits = save(number + 1)
                blocked = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
                if waits is not None:
                    waits()
                dist.all_reduce(blocked, dist.ReduceOp.MAX)
                if number and dist.get_rank() == 0:
                    print(json.dumps({"method": name, "blocked_s": blocked.item()}), flush=True)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(self._directory / "theirs", ignore_errors=True)


def ours(adapter: Any, parts: Callable[[], Any]) -> Save:
    """Return the save that an adapter makes after a step."""

    def save(step: int) -> Any:
        handle = adapter._checkpoint.save(step, parts())
        return lambda: handle.wait("committed")

    return save


def lightning(megabytes: int, repeats: int, directory: Path) -> None:
    """Save by Lightning's ``save_checkpoint``, under DDP."""
    import lightning.pytorch as pl

    from resilio_hpc.frameworks.lightning import ResilioCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layers(megabytes)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            theirs = directory / "theirs" / "last.ckpt"
            Measured(
                directory,
                repeats,
                {
                    "resilio_hpc": ours(callback, callback._state.parts),
                    "Lightning": lambda step: trainer.save_checkpoint(theirs),
                },
            ).run()

    callback = ResilioCallback(every=0, directory=directory / "ours", memory=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, Saves()],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Random(), batch_size=4))


def transformers(megabytes: int, repeats: int, directory: Path) -> None:
    """Save as the Trainer does by itself, under DDP."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resilio_hpc.frameworks import transformers as adapter

    class Saves(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            methods = {
                "resilio_hpc": ours(steps[0], steps[0].parts),
                "Trainer": lambda step: trainer._save_checkpoint(trainer.model, None),
            }
            Measured(directory, repeats, methods).run()

    steps: list[Any] = []
    made = adapter._TrainerSteps.__init__

    def noted(self: Any, *words: Any) -> None:
        made(self, *words)
        steps.append(self)

    adapter._TrainerSteps.__init__ = noted  # type: ignore[method-assign]
    settings = TrainingArguments(
        output_dir=str(directory / "theirs"), max_steps=1, per_device_train_batch_size=4, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Layers(megabytes), settings, train_dataset=Random(), callbacks=[Saves()])
    adapter.make_resilient(trainer, every=0, directory=directory / "ours")
    trainer.train()


def ignite(megabytes: int, repeats: int, directory: Path) -> None:
    """Ignite's ``Checkpoint`` on a disk, under DDP."""
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    from resilio_hpc.frameworks.ignite import _EngineSteps

    model = nn.parallel.DistributedDataParallel(Layers(megabytes))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, WIDTH))["loss"].backward()
    optimizer.step()
    objects, trainer = {"model": model, "optimizer": optimizer}, Engine(lambda *_: None)
    steps = _EngineSteps(trainer, objects, 0, directory / "ours", 0, {})

    def theirs(step: int) -> None:
        files = DiskSaver(str(directory / "theirs"), require_empty=False)
        Checkpoint(objects, files, global_step_transform=lambda *_: step)(trainer)

    Measured(directory, repeats, {"resilio_hpc": ours(steps, steps.parts), "Ignite": theirs}).run()


def deepspeed(megabytes: int, repeats: int, directory: Path) -> None:
    """DeepSpeed's ``save_checkpoint``, of ZeRO 3."""
    import deepspeed

    from resilio_hpc.frameworks.deepspeed import DeepSpeedSteps

    deepspeed.init_distributed("gloo")
    model = Layers(megabytes)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loader = DataLoader(Random(), batch_size=4)
    steps = DeepSpeedSteps(engine, loader, every=0, directory=directory / "ours")
    for _ in steps.epochs(1):
        for batch in loader:
            engine.backward(engine(batch["x"])["loss"])
            engine.step()
            methods = {
                "resilio_hpc": ours(steps, steps.parts),
                "DeepSpeed": lambda step: engine.save_checkpoint(str(directory / "theirs"), tag=str(step)) and None,
            }
            Measured(directory, repeats, methods).run()
            break


def dcp(megabytes: int, repeats: int, directory: Path) -> None:
    """torch.distributed.checkpoint, of a model under FSDP2: ``save``, and ``async_save``."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from resilio_hpc.ckpt import Checkpointer

    model = Layers(megabytes)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, WIDTH))["loss"].backward()
    optimizer.step()
    mine = Checkpointer(directory / "ours")

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def save(step: int) -> Any:
        handle = mine.save(step, {"model": model, "optimizer": optimizer})
        return lambda: handle.wait("committed")

    def in_background(step: int) -> Any:
        return checkpoint.async_save(state(), checkpoint_id=str(directory / "theirs" / f"async-{step}")).result

    methods = {
        "resilio_hpc": save,
        "DCP": lambda step: checkpoint.save(state(), checkpoint_id=str(directory / "theirs" / str(step))) and None,
        "DCP, async": in_background,
    }
    Measured(directory, repeats, methods).run()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    dist.destroy_process_group()
