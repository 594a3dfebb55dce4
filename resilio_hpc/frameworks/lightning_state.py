"""The whole state of a Lightning ``fit``: what is in a checkpoint, and how the loops go on from there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch

from resilio_hpc.ckpt import rng_state, set_rng_state
from resilio_hpc.core.errors import UsageError
from resilio_hpc.train.loader_position import LoaderPosition

_BASE = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks")


class LightningState:
    """State of one Trainer between two steps.

    ``parts()`` is what is saved: torch's objects themselves, and one object for all that is small.
    """

    def __init__(self, trainer: Any) -> None:
        """``trainer``: a ``lightning.pytorch.Trainer``."""
        self.trainer = trainer
        self.completed = 0
        self.is_asking = False  # hooks for checkpoints are called
        self._positions: list[LoaderPosition] = []
        self._global_step = 0
        self._is_epoch_end = False
        self._found: dict[str, Any] | None = None
        self._metrics: dict[str, float] = {}  # of validation: what others monitor at the end of an epoch

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored."""
        trainer = self.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "module": trainer.lightning_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "scaler": [] if scaler is None else [scaler],
            "fit": self,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return loops, callbacks, positions of loaders, and random number generators."""
        trainer = self.trainer
        taken = 0 if self._is_epoch_end else trainer.fit_loop.epoch_loop.batch_progress.current.completed
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # Lightning loads it before the sampler knows its epoch
        return {
            "completed": self.completed,
            "global_step": trainer.global_step,
            "is_epoch_end": self._is_epoch_end,
            "loops": loops,
            "loaders": [position.state(_taken_of(position.loader, taken)) for position in self._positions],
            "taken": taken,
            "metrics": dict(self._metrics),
            "random": rng_state(),
            **self._of_hooks(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until the loops take it."""
        self._found = state

    def _of_hooks(self) -> dict[str, Any]:
        """Return what callbacks, the module and the data module add to checkpoints of Lightning."""
        trainer, module = self.trainer, self.trainer.lightning_module
        states = {one.state_key: one.state_dict() for one in trainer.callbacks}
        callbacks = {key: state for key, state in states.items() if state}
        added: dict[str, Any] = {}
        askers = [one for one in (*trainer.callbacks, module) if _has_own_hook(one, "on_save_checkpoint")]
        if askers:
            added = self._base({}, callbacks)
            self.is_asking = True
            try:
                for one in askers:
                    one.on_save_checkpoint(added) if one is module else one.on_save_checkpoint(trainer, module, added)
            finally:
                self.is_asking = False
            added = {key: value for key, value in added.items() if key not in _BASE}
        data = trainer.datamodule.state_dict() if trainer.datamodule is not None else {}
        return {"callbacks": callbacks, "added": added, "datamodule": data}

    def _base(self, loops: Any, callbacks: Any) -> dict[str, Any]:
        """Return what hooks expect in a checkpoint of Lightning besides what they add."""
        trainer = self.trainer
        values = trainer.current_epoch, trainer.global_step, "", trainer.lightning_module.state_dict(), loops, callbacks
        return dict(zip(_BASE, values, strict=True))

    # -- going on --------------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """Bring the loops and all that hooks keep to where they were. Before the loops begin."""
        found, trainer = self._found, self.trainer
        assert found is not None
        trainer._checkpoint_connector._loaded_checkpoint = {}  # of ckpt_path, which is older
        self.completed, self._global_step = found["completed"], found["global_step"]
        self._is_epoch_end = found["is_epoch_end"]
        trainer.fit_loop.load_state_dict(found["loops"])
        self._metrics = dict(found["metrics"])
        known = {
            name: torch.tensor(value, device=trainer.strategy.root_device) for name, value in self._metrics.items()
        }
        trainer._logger_connector._callback_metrics.update(known)
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        module = trainer.lightning_module
        for one in trainer.callbacks:
            if one.state_key in found["callbacks"]:
                one.load_state_dict(copy.deepcopy(found["callbacks"][one.state_key]))
        for one in (*trainer.callbacks, module):
            if _has_own_hook(one, "on_load_checkpoint"):
                added = {**self._base(found["loops"], found["callbacks"]), **found["added"]}
                one.on_load_checkpoint(added) if one is module else one.on_load_checkpoint(trainer, module, added)
        if trainer.datamodule is not None and found["datamodule"]:
            trainer.datamodule.load_state_dict(found["datamodule"])
        set_rng_state(found["random"])

    def see_loaders(self) -> None:
        """Take note of each loader for training that Lightning makes, before it is iterated."""
        strategy, trainer = self.trainer.strategy, self.trainer
        own = type(strategy).process_dataloader

        def process(loader: Any) -> Any:
            made = own(strategy, loader)
            if trainer.training:
                count = len(trainer.fit_loop._combined_loader.flattened) if trainer.fit_loop._combined_loader else 0
                if count and len(self._positions) >= count:
                    self._positions.clear()  # they are made again
                self._positions.append(LoaderPosition(made))
                if self._positions[-1].is_own and _length_of(made) is None:
                    raise UsageError(
                        f"ResilioCallback: this {type(made).__name__} has no length, so Lightning fetches a batch "
                        "ahead of the state that it has: give its data set a __len__, or use torch's DataLoader"
                    )
            return made

        strategy.process_dataloader = process

    def begin(self) -> None:
        """Begin to train: all loaders are there."""
        found, fit = self._found, self.trainer.fit_loop
        if found is None or not self._is_epoch_end:
            return
        self._found = None
        for position, state in zip(self._positions, found["loaders"], strict=True):
            position.load(state, between=True)
        fit.restarting = fit._resuming_from_checkpoint = fit._loaded_from_state_dict = False
        set_rng_state(found["random"])

    def begin_epoch(self, call: Callable[..., None], fetcher: Any) -> None:
        """Begin an epoch, or go on within it. ``call``: Lightning's own part."""
        found, self._found = self._found, None
        self._is_epoch_end = False
        if found is None:
            call(fetcher)
            return
        set_rng_state(found["random"])
        for position, state in zip(self._positions, found["loaders"], strict=True):
            position.load(state)
        iter(fetcher)
        for position in self._positions:
            position.begin_other()
        is_sized = fetcher.length is not None
        take = (lambda: next(fetcher.iterator)) if is_sized else (lambda: next(fetcher))
        for position in self._positions[:1]:
            position.pass_over(take)
        for position in self._positions[1:]:
            position.pass_over(lambda: None)
        if not is_sized:
            fetcher.fetched -= found["taken"]
        if any(not position._place for position in self._positions) or not is_sized:
            set_rng_state(found["random"])
        call(fetcher)
        self.trainer.fit_loop.epoch_loop.restarting = False  # all of the last batch is done, its validation too

    def keep_metrics(self) -> None:
        """Keep what validation has found, as plain numbers."""
        self._metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def take_step(self, is_epoch_end: bool) -> bool:
        """Return whether a step has ended since the boundary before."""
        if self.trainer.global_step == self._global_step:
            return False
        self._global_step = self.trainer.global_step
        self.completed += 1
        self._is_epoch_end = is_epoch_end
        return True


def _has_own_hook(owner: Any, name: str) -> bool:
    """Return whether a class of the user's, or a callback, has a hook that does something."""
    defined = next(one for one in type(owner).__mro__ if name in vars(one))
    ours = type(owner).__module__.startswith("resilio_hpc.")
    return not ours and defined.__name__ not in ("Callback", "CheckpointHooks", "LightningModule")


def _taken_of(loader: Any, taken: int) -> int:
    """Return how many batches of a loader were taken. A loader that is shorter than others begins again."""
    size = _length_of(loader)
    return taken % size if size is not None and taken > size else taken


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
