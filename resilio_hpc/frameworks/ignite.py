"""PyTorch-Ignite: agreed stops, saves of the last finished step, exact resume, sections (NVX-8).

    from resilio_hpc.frameworks.ignite import make_resilient

    make_resilient(trainer, {"model": model, "optimizer": optimizer}, every=100)
    trainer.run(loader, max_epochs=3)

A step is an iteration after which an optimizer has stepped. Its boundary is the end of all handlers of
ITERATION_COMPLETED; after an epoch's last iteration, of those of EPOCH_COMPLETED. A handler may be added later than
ours. So the methods of this one Engine that run it, and fire its events, are called through this module's. See
docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state
from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.call_through import call_through
from resilio_hpc.train.exact_resume import ddp_wrappers, warm_up_ddp
from resilio_hpc.train.loader_position import LoaderPosition
from resilio_hpc.train.run import attach
from resilio_hpc.train.step_loop import StepLoop

_ENGINE = ("run", "_fire_event", "terminate", "state", "state_dict_user_keys")


def make_resilient(
    trainer: Any,
    objects: Mapping[str, Any],
    every: int = 100,
    directory: str | os.PathLike[str] | None = None,
    *,
    evaluators: Sequence[Any] = (),
    total_steps: int = 0,
    **options: Any,
) -> None:
    """Have ``trainer.run()`` survive failures under resilio-launch, and go on from a committed checkpoint without it.

    ``objects``: what is saved beside the Engine's own state, as ``to_save`` of Ignite's Checkpoint: models, optimizers,
    schedules, handlers with a state. ``every``: save after so many steps (0: only at the end, at a stop, and when ranks
    cannot go on). ``directory`` and ``options`` are the Checkpointer's. Runs of ``evaluators`` are no hang.
    ``total_steps``: for the view, where a step takes several iterations. Call it once, before ``run``. Raises
    UsageError for an Engine that is none, for objects without an optimizer, and for models that are sharded.
    """
    missing = [name for name in _ENGINE if not hasattr(trainer, name)]
    if missing:
        raise UsageError(f"make_resilient takes an Engine of Ignite: {type(trainer).__name__} has no {missing[0]}")
    steps = _EngineSteps(trainer, objects, every, directory, total_steps, options)
    call_through(trainer, "run", steps.run)
    call_through(trainer, "_fire_event", steps.fire)
    for evaluator in evaluators:
        call_through(evaluator, "run", steps.evaluate)


class _EngineSteps:
    """The steps of one Engine."""

    def __init__(
        self, trainer: Any, objects: Mapping[str, Any], every: int, directory: Any, total: int, options: dict[str, Any]
    ) -> None:
        self._trainer, self._run = trainer, attach()
        self._objects = {name: _unwrapped(one) for name, one in objects.items() if one is not trainer}
        optimizers = [one for one in self._objects.values() if isinstance(one, torch.optim.Optimizer)]
        if not optimizers:
            raise UsageError('make_resilient needs the optimizer, too: {"model": model, "optimizer": optimizer}')
        for one in optimizers:
            one.register_step_post_hook(self._note_step)
        self._checkpoint = Checkpointer(directory or self._run.checkpoint_dir, layout=REPLICATED, **options)
        self._loop = StepLoop(self._run, self._checkpoint.saver(self.parts), every)
        self._total = total
        self._position: LoaderPosition | None = None
        self._found: dict[str, Any] | None = None
        self._completed = 0
        self._epochs = self._in_epoch = 0  # complete epochs, and iterations of the one under way
        self._taken: int | None = None  # batches of the loader's iteration under way; None: there is none
        self._has_stepped = self._is_due = self._is_stopping = self._begins_again = False
        self._before: dict[str, Callable[[], None]] = {
            "EPOCH_STARTED": self._begin_epoch,
            "GET_BATCH_STARTED": self._pass_over,
            "ITERATION_STARTED": self._begin_iteration,
            "TERMINATE": self._end,
            "COMPLETED": self._end,
        }
        self._after: dict[str, Callable[[], None]] = {
            "STARTED": self._begin,
            "EPOCH_STARTED": self._go_on_in_epoch,
            "GET_BATCH_COMPLETED": self._take_batch,
            "DATALOADER_STOP_ITERATION": self._end_iteration_of_loader,
            "TERMINATE_SINGLE_EPOCH": self._end_epoch_early,
            "ITERATION_COMPLETED": self._end_iteration,
            "EPOCH_COMPLETED": self._end_epoch,
        }

    # -- the state -------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored: torch's objects themselves, and one object for all that is small."""
        return {"objects": self._objects, "engine": self}

    def state_dict(self) -> dict[str, Any]:
        """Return where the Engine is, and the random number generators."""
        state = self._trainer.state
        return {
            "completed": self._completed,
            "iteration": state.iteration,
            "epochs": self._epochs,
            "in_epoch": self._in_epoch,
            "epoch_length": state.epoch_length,
            "user": {name: getattr(state, name) for name in self._trainer.state_dict_user_keys},
            "taken": self._taken,
            "position": None if self._position is None else self._position.state(self._taken or 0),
            "random": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until the Engine runs."""
        self._found = state

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(
        self, call: Callable[..., Any], data: Any = None, max_epochs: int | None = None, max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> Any:  # fmt: skip
        """Restore, have the Engine run, and leave where all ranks stop. ``call``: the Engine's own part."""
        trainer = self._trainer
        if trainer._internal_run_generator is None:  # else it was interrupted, and goes on
            if self._loop.has_begun:
                raise UsageError("make_resilient: one run of the Engine for each directory of checkpoints")
            self._restore(data)
            if self._found is not None:
                self._put_back(self._found, data, max_epochs, max_iters)
                if trainer._is_done(trainer.state):
                    trainer.state.epoch += self._in_epoch > 0  # it ended within an epoch
                    self._end()
                    return trainer.state
        result = call(data, max_epochs, max_iters, epoch_length)
        self._loop.leave_if(self._is_stopping, self._completed)
        return result

    def _restore(self, data: Any) -> None:
        self._position = None if data is None else LoaderPosition(data)
        if self._position is not None and self._position.is_own:
            raise UsageError(f"make_resilient keeps the position of torch's DataLoader, not of {type(data).__name__}")
        self._checkpoint.restore(self.parts())
        for wrapper in ddp_wrappers(list(self._objects.values())):
            warm_up_ddp(wrapper)

    def _put_back(self, found: dict[str, Any], data: Any, max_epochs: int | None, max_iters: int | None) -> None:
        """Bring the Engine to where it was, as far as that is no part of its run."""
        state = self._trainer.state
        self._completed, self._epochs, self._in_epoch = found["completed"], found["epochs"], found["in_epoch"]
        state.iteration, state.epoch, state.epoch_length = found["iteration"], found["epochs"], found["epoch_length"]
        state.max_iters = max_iters
        state.max_epochs = (max_epochs or 1) if max_iters is None else None
        for name, value in found["user"].items():
            setattr(state, name, value)
        self._trainer._init_iter = self._in_epoch
        if self._position is not None:
            is_between = found["taken"] in (None, _length_of(data))
            self._taken = None if is_between else found["taken"]
            self._position.load(found["position"], between=is_between)

    def _begin(self) -> None:
        state = self._trainer.state
        iterations = state.max_iters or (state.max_epochs or 0) * (state.epoch_length or 0)
        total = max(self._total or iterations, self._completed)
        self._stop_if(self._loop.begin(self._completed, total))

    def _end(self) -> None:
        """Save the last step: handlers may load the best model next."""
        self._loop.end(self._completed)

    def _stop_if(self, stop: bool) -> None:
        if stop:
            self._is_stopping = True
            self._trainer.terminate(skip_completed=True)

    # -- events ----------------------------------------------------------------------------------------------------

    def fire(self, call: Callable[..., None], event: Any, *arguments: Any, **words: Any) -> None:
        """Do what comes before and after an event's handlers. ``call``: the Engine's own part."""
        name = getattr(event, "name", event)
        if name in self._before:
            self._before[name]()
        if name == "EPOCH_COMPLETED":
            with self._run.section("end of epoch"):
                call(event, *arguments, **words)
        else:
            call(event, *arguments, **words)
        if name in self._after:
            self._after[name]()

    def evaluate(self, call: Callable[..., Any], *arguments: Any, **words: Any) -> Any:
        """Have an evaluator run."""
        with self._run.section("evaluation"):
            return call(*arguments, **words)

    def _begin_epoch(self) -> None:
        self._epochs = self._trainer.state.epoch - 1
        if self._found is None:
            self._in_epoch = 0
            self._boundary_if_due()  # of an epoch that was ended without the event of its end
        elif self._in_epoch == 0:
            set_rng_state(self._found["random"])

    def _go_on_in_epoch(self) -> None:
        """After the handlers of the epoch's start, which were called again. The loader's iteration begins next."""
        found, self._found = self._found, None
        if found is not None and self._in_epoch:
            set_rng_state(found["random"])

    def _pass_over(self) -> None:
        """Before the handlers of a batch: take those that were taken before, where the loader has to read them."""
        position = self._position
        if position is None:
            return
        if position.loader is not self._trainer.state.dataloader:
            raise UsageError("make_resilient: the position in the loader that set_data has set is not known")
        if self._begins_again:
            self._begins_again = False
            self._trainer._setup_dataloader_iter()
        position.begin_other()
        position.pass_over(lambda: next(self._trainer._dataloader_iter))

    def _take_batch(self) -> None:
        self._taken = (self._taken or 0) + 1

    def _end_iteration_of_loader(self) -> None:
        self._taken = None

    def _end_epoch_early(self) -> None:
        """Have the loader's next iteration begin with its first batch. Ignite begins it now, handlers come between."""
        self._taken, self._begins_again = None, True

    def _begin_iteration(self) -> None:
        self._in_epoch += 1

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def _end_iteration(self) -> None:
        trainer, state = self._trainer, self._trainer.state
        self._run.log(self._completed + 1, **_values_of(state.output))
        if not self._has_stepped:
            return
        self._has_stepped = False
        self._completed += 1
        if self._in_epoch == state.epoch_length or trainer.should_terminate_single_epoch:
            self._is_due = True
        elif not trainer.should_terminate:
            self._boundary(is_last=state.max_iters is not None and state.iteration >= state.max_iters)

    def _end_epoch(self) -> None:
        self._epochs, self._in_epoch = self._trainer.state.epoch, 0
        self._boundary_if_due()

    def _boundary_if_due(self) -> None:
        is_due, self._is_due = self._is_due, False
        if is_due:
            self._boundary(is_last=self._trainer._is_done(self._trainer.state) or bool(self._trainer.should_terminate))

    def _boundary(self, is_last: bool) -> None:
        self._stop_if(self._loop.boundary(self._completed, is_last))


def _unwrapped(one: Any) -> Any:
    """Return the model that DDP wraps. Raises UsageError for a model of which each rank has a part."""
    model = one.module if isinstance(one, DistributedDataParallel) else one
    if isinstance(model, torch.nn.Module):
        kinds = {type(part).__name__ for part in (*model.modules(), *model.parameters())}
        if kinds & {"FullyShardedDataParallel", "DTensor"}:
            raise UsageError("make_resilient knows one device and DDP, not models of which each rank has a part")
    return model


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _values_of(output: Any) -> dict[str, Any]:
    """Return the numbers of a trainer's output: its loss, as a rule."""
    values = output if isinstance(output, dict) else {"loss": output}
    return {str(name): one for name, one in values.items() if _is_number(one)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (torch.is_tensor(value) and value.numel() == 1)
