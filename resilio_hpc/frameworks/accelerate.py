"""Hugging Face's Accelerate: agreed stops, saves of the last finished step, exact resume, sections (NVX-8).

    from resilio_hpc.frameworks.accelerate import AcceleratedSteps

    steps = AcceleratedSteps(accelerator, every=100)  # after accelerator.prepare
    for epoch in steps.epochs(3):
        for batch in steps.batches(loader):
            ...

A step is a batch with which gradients were synchronised. It ends with the body of the loop; an epoch's last one ends
with the body of the epoch, so that an evaluation there belongs to it. See docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard

from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state
from resilio_hpc.core.errors import UsageError
from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.loader_position import LoaderPosition
from resilio_hpc.train.run import Run, attach
from resilio_hpc.train.step_loop import StepLoop

_KNOWN = ("NO", "MULTI_CPU", "MULTI_GPU")


class AcceleratedSteps:
    """Epochs and batches of a script that has prepared its objects with ``accelerator``.

    What is saved: all that was prepared, or given to ``register_for_checkpointing``. ``every``: save after so many
    steps (0: only at the end, at a stop, and when ranks cannot go on). ``directory`` and ``options`` are the
    Checkpointer's. Raises UsageError for FSDP, DeepSpeed and Megatron, whose state is not known here.
    """

    def __init__(
        self, accelerator: Any, every: int = 100, directory: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        kind = accelerator.distributed_type.name
        if kind not in _KNOWN:
            raise UsageError(f"AcceleratedSteps knows one device and DDP, not {kind}")
        self.run: Run = attach()
        self.completed = 0
        self._accelerator, self._every = accelerator, every
        self._checkpoint = Checkpointer(directory or self.run.checkpoint_dir, layout=REPLICATED, **options)
        self._epoch = self._taken = 0
        self._is_due = False  # a step has ended, and its boundary comes with the epoch's end
        self._position: LoaderPosition | None = None
        self._found: dict[str, Any] | None = None
        self._loop: StepLoop | None = None

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored: torch's objects themselves, and one object for all that is small."""
        own = self._accelerator
        return {
            "models": [own.unwrap_model(model) for model in own._models],
            "optimizers": [one.optimizer for one in own._optimizers],
            "schedules": [one.scheduler for one in own._schedulers],
            "scaler": [] if own.scaler is None else [own.scaler],
            "custom": list(own._custom_objects),
            "steps": self,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, and the random number generators."""
        position = None if self._position is None else self._position.state(self._taken)
        return {
            "completed": self.completed,
            "epoch": self._epoch,
            "taken": self._taken,
            "position": position,
            "accumulated": self._accelerator.step,
            "random": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until the loops begin."""
        self._found = state

    def epochs(self, total: int, total_steps: int = 0) -> Iterator[int]:
        """Yield the epochs that are left of ``total``; before the first one, restore. ``total_steps``: for the view."""
        self._checkpoint.restore(self.parts())
        found = self._found
        if found is not None:
            self.completed, self._epoch, self._taken = found["completed"], found["epoch"], found["taken"]
            self._accelerator.step = found["accumulated"]
        for model in self._accelerator._models:
            if type(model).__name__ == "DistributedDataParallel":
                warm_up_ddp(model)
        if found is not None:
            set_rng_state(found["random"])
        if self._epoch < total:
            self._loop = StepLoop(self.run, self._checkpoint.saver(self.parts), self._every)
            self._stop_if(self._loop.begin(self.completed, max(total_steps, self.completed)))
        while self._epoch < total:
            yield self._epoch
            self._epoch, self._taken = self._epoch + 1, 0
            if self._is_due:
                self._boundary(self._epoch == total)
        self._end()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a prepared loader that are left in this epoch."""
        if self._loop is None:
            raise UsageError("steps.batches is for the body of steps.epochs")
        if not isinstance(loader, DataLoaderShard):
            raise UsageError(f"steps.batches takes a loader that accelerator.prepare made, not {type(loader).__name__}")
        if self._position is None or self._position.loader is not loader.base_dataloader:
            self._position = LoaderPosition(loader.base_dataloader, looks_ahead=True)
        loader.set_epoch(self._epoch)
        found, self._found = self._found, None
        if found is not None and found["position"] is not None:
            self._position.load(found["position"], between=self._taken == 0)
        batches = iter(loader)
        self._position.pass_over(lambda: next(batches))
        for batch in batches:
            yield batch
            self._taken += 1
            if not self._accelerator.sync_gradients:
                continue
            self.completed += 1
            if loader.end_of_dataloader:
                self._is_due = True
            else:
                self._boundary(False)

    def section(self, name: str) -> Any:
        """Do something beside the steps, such as an evaluation: ``with steps.section("evaluation"):``."""
        return self.run.section(name)

    def log(self, **values: object) -> None:
        """Tell the launcher of numbers of the step under way, as ``run.log``."""
        self.run.log(self.completed + 1, **values)

    def _boundary(self, is_last: bool) -> None:
        self._is_due = False
        assert self._loop is not None
        self._stop_if(self._loop.boundary(self.completed, is_last))

    def _stop_if(self, stop: bool) -> None:
        if stop:
            self._end()
            raise SystemExit(0)

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.end(self.completed)
        else:
            self.run.finish(self.completed)
