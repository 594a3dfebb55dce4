"""PyTorch Lightning's Trainer: agreed stops, saves of the last finished step, exact resume, sections (NVX-8).

    from resilio_hpc.frameworks.lightning import ResilioCallback

    trainer = Trainer(..., callbacks=[ResilioCallback(every=100)])

A step is a batch after which an optimizer has stepped. Its boundary is the end of what Lightning does after that batch,
validation included; after an epoch's last batch, it is the end of the epoch. Lightning has no hook there, so two
methods of its loops are called through this module's, on the Trainer's own loops. See docs/frameworks.md.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.lightning_state import LightningState
from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.last_step import save_before_end
from resilio_hpc.train.run import Run, attach
from resilio_hpc.train.step_loop import StepLoop

_REPLICATED_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_OWN_STRATEGIES = ("ModelParallelStrategy",)


def _callback_base() -> Any:
    """Return the class of callbacks of the Lightning that the script uses; there are two packages of it."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda one: one not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise UsageError("resilio_hpc.frameworks.lightning needs PyTorch Lightning 2: pip install lightning")


class ResilioCallback(_callback_base()):  # type: ignore[misc]
    """Makes ``trainer.fit`` survive failures under resilio-launch, and go on from a committed checkpoint without it.

    ``every``: save after so many steps (0: only at the end, at a stop, and when ranks cannot go on). ``directory`` and
    ``options`` are the Checkpointer's. Raises UsageError for a strategy whose state is not known.
    """

    def __init__(self, every: int = 100, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._every, self._directory, self._options = every, directory, options
        self._run: Run = attach()
        self._checkpoint: Checkpointer | None = None
        self._section: AbstractContextManager[None] | None = None
        self._state: LightningState | None = None
        self._loop: StepLoop | None = None

    # -- before training -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Be there before the loaders and the loops are used."""
        if stage != "fit":
            return
        layout = _layout_of(trainer.strategy)
        if self._checkpoint is None:
            directory = self._directory or self._run.checkpoint_dir
            self._checkpoint = Checkpointer(directory, layout=layout, **self._options)
        self._state = LightningState(trainer)
        self._loop = StepLoop(self._run, self._checkpoint.saver(self._state.parts), self._every)
        self._state.see_loaders()
        _call_through(trainer.fit_loop.epoch_loop, "on_run_start", self._on_epoch_begin)
        _call_through(trainer.fit_loop.epoch_loop, "on_advance_end", self._on_batch_end)
        _call_through(trainer.fit_loop, "on_advance_end", self._on_epoch_end)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: model, optimizers and schedulers are there, and no loop has begun."""
        assert self._checkpoint is not None and self._state is not None
        if self._checkpoint.restore(self._state.parts()) is not None:
            self._state.put_back()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave signals to the agent, and make DDP's buckets the same in each life."""
        assert self._state is not None
        if self._run.launched:
            _give_back_sigterm(trainer)
        if type(trainer.strategy.model).__name__ == "DistributedDataParallel":
            warm_up_ddp(trainer.strategy.model)
        self._state.begin()

    # -- boundaries ------------------------------------------------------------------------------------------------

    def _on_epoch_begin(self, call: Callable[..., None], fetcher: Any) -> None:
        state, loop = self._state, self._loop
        assert state is not None and loop is not None
        state.begin_epoch(call, fetcher)
        if not loop.has_begun:
            total = state.trainer.estimated_stepping_batches
            known = int(total) if math.isfinite(total) else state.completed
            loop.leave_if(loop.begin(state.completed, max(known, state.completed)), state.completed)

    def _on_batch_end(self, call: Callable[..., None], fetcher: Any) -> None:
        call(fetcher)
        assert self._state is not None
        if not self._state.trainer.fit_loop.epoch_loop.done:  # else the epoch's end belongs to the step
            self._boundary(is_epoch_end=False)

    def _on_epoch_end(self, call: Callable[..., None]) -> None:
        call()
        self._boundary(is_epoch_end=True)

    def _boundary(self, is_epoch_end: bool) -> None:
        state, loop = self._state, self._loop
        assert state is not None and loop is not None
        if state.take_step(is_epoch_end):
            self._leave_section()
            loop.leave_if(loop.boundary(state.completed), state.completed)

    def _end(self) -> None:
        self._leave_section()
        if self._state is not None and self._loop is not None:
            self._loop.end(self._state.completed)

    # -- Lightning's hooks -----------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the launcher of the loss."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and self._state is not None:
            self._run.log(self._state.completed + 1, loss=loss)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Enter a section: other callbacks' saves follow."""
        self._enter_section("end of epoch")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Leave the section: steps again."""
        self._leave_section()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter a section: validation is no step."""
        self._enter_section("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the section, and keep what was found."""
        self._leave_section()
        if self._state is not None and not trainer.sanity_checking:
            self._state.keep_metrics()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning's own save is no step."""
        if not (self._state is not None and self._state.is_asking):
            self._enter_section("checkpoint of Lightning")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Training that was complete when it was restored has had no other end."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the last finished step now: Lightning moves the model next."""
        self._leave_section()
        if isinstance(exception, Exception):
            self._run.give_up_step()
            save_before_end(exception)

    def _enter_section(self, name: str) -> None:
        self._leave_section()
        self._section = self._run.section(name)
        self._section.__enter__()

    def _leave_section(self) -> None:
        section, self._section = self._section, None
        if section is not None:
            section.__exit__(None, None, None)


def _layout_of(strategy: Any) -> Any:
    names = [one.__name__ for one in type(strategy).__mro__]
    if any(name in names for name in _REPLICATED_STRATEGIES):
        return REPLICATED
    if any(name in names for name in _OWN_STRATEGIES):
        return None
    known = ", ".join((*_REPLICATED_STRATEGIES, *_OWN_STRATEGIES))
    raise UsageError(f"ResilioCallback knows {known}, not {names[0]}: without it, Lightning's own checkpoints are used")


def _call_through(owner: Any, name: str, through: Callable[..., None]) -> None:
    """Have ``owner.name(…)`` call ``through(owner.name, …)``. Raises UsageError where there is no such method."""
    own = getattr(type(owner), name, None)
    if own is None:
        raise UsageError(f"ResilioCallback: this Lightning has no {type(owner).__name__}.{name}; it was made for 2.6")

    def call(*arguments: Any) -> None:
        through(lambda *given: own(owner, *given), *arguments)

    setattr(owner, name, call)


def _give_back_sigterm(trainer: Any) -> None:
    """Lightning takes SIGTERM for its own stop, which ranks do not agree on. The agent makes a better one of it."""
    before = getattr(trainer._signal_connector, "_original_handlers", {}).get(signal.SIGTERM)
    if before is not None:
        signal.signal(signal.SIGTERM, before)
