"""Hugging Face's Trainer: agreed stops, saves of the last finished step, exact resume, sections (NVX-8).

    from resilio_hpc.frameworks.transformers import make_resilient

    make_resilient(trainer, every=100)
    trainer.train()

A step is the Trainer's ``global_step``. Its boundary is the end of what the Trainer does after it, evaluation included;
after an epoch's last step, it is the end of the epoch. TrainerCallbacks are called before that, and know no Trainer. So
some methods of this one Trainer are called through this module's. See docs/frameworks.md.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state
from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.call_through import call_through
from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.run import attach
from resilio_hpc.train.step_loop import StepLoop

_MOST_LOGS = 200  # entries of the log's history that are saved
_OURS = "resilio"  # in place of the folder of a checkpoint
_WRAPPED = (
    "get_train_dataloader", "_init_training_state", "_prepare_for_training", "_run_epoch", "_maybe_log_save_evaluate",
    "_load_rng_state", "_finalize_training",
)  # fmt: skip


def make_resilient(
    trainer: Any, every: int = 100, directory: str | os.PathLike[str] | None = None, **options: Any
) -> None:
    """Have ``trainer.train()`` survive failures under resilio-launch, and go on from a committed checkpoint without it.

    ``every``: save after so many steps (0: only at the end, at a stop, and when ranks cannot go on). ``directory`` and
    ``options`` are the Checkpointer's. Call it before ``train``, once. Raises UsageError for FSDP and DeepSpeed, whose
    state is not known here, and for a Trainer that lacks the methods that are called through.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UsageError("make_resilient knows one device and DDP, not FSDP or DeepSpeed")
    missing = [name for name in _WRAPPED if not hasattr(trainer, name)]
    if missing:
        raise UsageError(f"make_resilient: this Trainer has no {missing[0]}; it was made for transformers 5.24")
    steps = _TrainerSteps(trainer, every, directory, options)
    for name in _WRAPPED:
        call_through(trainer, name, getattr(steps, name.lstrip("_")))
    trainer.add_callback(_Notes(steps))


class _TrainerSteps:
    """The steps of one Trainer. Methods with a ``call`` stand before the Trainer's own ones, of the same names."""

    def __init__(
        self, trainer: Any, every: int, directory: str | os.PathLike[str] | None, options: dict[str, Any]
    ) -> None:
        self.trainer, self.run = trainer, attach()
        self._every = every
        self._checkpoint = Checkpointer(directory or self.run.checkpoint_dir, layout=REPLICATED, **options)
        self._loader: Any = None
        self._prepared: Any = None
        self._found: dict[str, Any] | None = None
        self._loop = self._new_loop()
        self._completed = 0
        self._steps_per_epoch = 0
        self.is_epoch_end = False

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored: torch's objects themselves, and one object for all that is small."""
        trainer = self.trainer
        scaler = trainer.accelerator.scaler
        return {
            "model": trainer.accelerator.unwrap_model(trainer.model),
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "schedule": trainer.lr_scheduler,
            "scaler": [] if scaler is None else [scaler],
            "trainer": self,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state, its callbacks' states, and the random number generators."""
        trainer = self.trainer
        names = [one.name for one in dataclasses.fields(trainer.state) if one.name != "stateful_callbacks"]
        state = {name: getattr(trainer.state, name) for name in names}
        state["log_history"] = state["log_history"][-_MOST_LOGS:]
        callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return {
            "state": state,
            "callbacks": [[type(one).__name__, one.state()["attributes"]] for one in callbacks],
            "random": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until the Trainer takes it."""
        self._found = state

    # -- before training -------------------------------------------------------------------------------------------

    def get_train_dataloader(self, call: Callable[[], Any]) -> Any:
        """Keep the loader, for ``init_training_state``."""
        self._loader = call()
        return self._loader

    def init_training_state(self, call: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
        """Restore, and return how many epochs, and batches of the next one, are done."""
        max_steps, self._steps_per_epoch, _, resume_from, _ = arguments
        done: tuple[int, int] = call(*arguments)
        self._forget()
        self._prepared = self._prepare(max_steps, resume_from)
        self._checkpoint.restore(self.parts())
        found = self._found
        if found is not None:
            trainer = self.trainer
            for name, value in found["state"].items():
                if not name.startswith("is_"):
                    setattr(trainer.state, name, copy.deepcopy(value))
            states = list(found["callbacks"])
            for one in trainer.callback_handler.callbacks:
                if states and isinstance(one, ExportableState) and type(one).__name__ == states[0][0]:
                    vars(one).update(copy.deepcopy(states.pop(0)[1]))
            epochs, steps = divmod(trainer.state.global_step, self._steps_per_epoch)
            done = epochs, steps * trainer.args.gradient_accumulation_steps
        if type(self.trainer.model_wrapped).__name__ == "DistributedDataParallel":
            warm_up_ddp(self.trainer.model_wrapped)
        self._completed = self.trainer.state.global_step
        return done

    def _forget(self) -> None:
        self._loop, self._found = self._new_loop(), None

    def _new_loop(self) -> StepLoop:
        return StepLoop(self.run, self._checkpoint.saver(self.parts), self._every)

    def _prepare(self, max_steps: int, resume_from: Any) -> Any:
        trainer = self.trainer
        return type(trainer)._prepare_for_training(trainer, max_steps, self._loader, resume_from)

    def prepare_for_training(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what was prepared, before the restore."""
        prepared, self._prepared = self._prepared, None
        return prepared

    # -- boundaries ------------------------------------------------------------------------------------------------

    def run_epoch(self, call: Callable[..., None], **words: Any) -> None:
        """Go on within an epoch, or begin one."""
        state, control = self.trainer.state, self.trainer.control
        if self._found is not None and words["epoch"] == words["epochs_trained"]:
            if state.global_step >= state.max_steps:
                control.should_training_stop = True
                return
            words["resume_from_checkpoint"] = _OURS
        if not self._loop.has_begun:
            if self._found is not None:
                set_rng_state(self._found["random"])
            stop = self._loop.begin(self._completed, max(state.max_steps, self._completed))
            self._loop.leave_if(stop, self._completed)
        self.is_epoch_end = False
        call(**words)
        self._found = None

    def load_rng_state(self, call: Callable[..., None], folder: Any) -> None:
        """Bring the generators to where they were: earlier batches are passed over by now."""
        if folder != _OURS:
            call(folder)
        elif self._found is not None:
            set_rng_state(self._found["random"])

    def maybe_log_save_evaluate(self, call: Callable[..., None], *arguments: Any, **words: Any) -> None:
        """After a step, or at the end of an epoch: after the Trainer's part, that is the boundary."""
        state, control = self.trainer.state, self.trainer.control
        if control.should_evaluate or control.should_save:
            with self.run.section("evaluation" if control.should_evaluate else "checkpoint of the Trainer"):
                call(*arguments, **words)
        else:
            call(*arguments, **words)
        is_last = state.global_step % self._steps_per_epoch == 0 or state.global_step >= state.max_steps
        is_last = is_last or control.should_epoch_stop or control.should_training_stop
        if state.global_step > self._completed and (self.is_epoch_end or not is_last):
            self._completed = state.global_step
            stop = self._loop.boundary(self._completed, is_last=self._completed >= state.max_steps)
            self._loop.leave_if(stop, self._completed)

    def finalize_training(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Save the last step: the best model may be loaded next."""
        self._loop.end(self._completed)
        return call(*arguments)


class _Notes(TrainerCallback):  # type: ignore[misc]
    """What the Trainer says on the way."""

    def __init__(self, steps: _TrainerSteps) -> None:
        self._steps = steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps.is_epoch_end = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._steps.run.log(state.global_step, **(logs or {}))
