"""Epochs of a script's own loop over a loader, for frameworks that leave the loop to the script.

A step is a batch after which an optimizer has stepped. It ends with the body of the loop over batches; an epoch's last
one ends with the body of the epoch, so that an evaluation there belongs to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from resilio_hpc.ckpt import Checkpointer, rng_state, set_rng_state
from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.call_through import call_through
from resilio_hpc.train.loader_position import LoaderPosition
from resilio_hpc.train.run import Run, attach
from resilio_hpc.train.step_loop import StepLoop


class EpochSteps:
    """Base of the adapters. ``for epoch in steps.epochs(3)``, and in it the loop over the loader as it was.

    A framework says what is saved (``parts``), how to go on from it (``_restore``, ``_go_on``), and when a step has
    ended (``_has_stepped``, ``_is_last_batch``). The loader's class becomes one that tells its iterations.
    """

    _looks_ahead = False  # whether the loader has always fetched the batch after the one in use

    def __init__(
        self,
        loader: Any,
        every: int,
        directory: str | os.PathLike[str] | None,
        layout: Literal["replicated"] | None,
        options: dict[str, Any],
    ) -> None:
        """``options``: of the Checkpointer. Raises UsageError for a loader whose iterations cannot be seen."""
        self.run: Run = attach()
        self.completed = 0
        self._loader, self._every = loader, every
        self._checkpoint = Checkpointer(directory or self.run.checkpoint_dir, layout=layout, **options)
        self._epoch = self._taken = 0
        self._is_due = False  # a step has ended, and its boundary comes with the epoch's end
        self._position: LoaderPosition | None = None
        self._found: dict[str, Any] | None = None
        self._loop: StepLoop | None = None
        _call_through(loader, self._batches)

    # -- what a framework says -------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored, ``self`` among it. It changes nothing."""
        raise NotImplementedError

    def _restore(self) -> None:
        self._checkpoint.restore(self.parts())

    def _go_on(self, found: dict[str, Any] | None) -> None:
        """Take what was restored besides tensors; None: nothing was. In every life, before the first step."""

    def _has_stepped(self) -> bool:
        """Return whether the batch that was just used has ended a step. Called once for each batch."""
        raise NotImplementedError

    def _is_last_batch(self) -> bool:
        """Return whether the epoch has no batch after the one that was just used, as far as that is known."""
        try:
            return self._taken >= len(self._loader)
        except TypeError:
            return False

    def _own_iterator(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an iteration over the plain DataLoader. ``own``: the loader's own ``__iter__``."""
        return own()

    def _plain_loader(self) -> Any:
        """Return torch's DataLoader that the loader reads from."""
        return self._loader

    # -- the state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, and the random number generators."""
        position = None if self._position is None else self._position.state(self._taken)
        return {
            "completed": self.completed,
            "epoch": self._epoch,
            "taken": self._taken,
            "position": position,
            "ranks": self.run.world_size,
            "random": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until the loops begin."""
        self._found = state

    # -- the loops -------------------------------------------------------------------------------------------------

    def epochs(self, total: int, total_steps: int = 0) -> Iterator[int]:
        """Yield the epochs that are left of ``total``; before the first one, restore. ``total_steps``: for the view."""
        self._restore()
        found = self._found
        if found is not None:
            self.completed, self._epoch = found["completed"], found["epoch"]
            self._taken = found["taken"] * found["ranks"] // self.run.world_size  # of all ranks, as many batches
            if found["position"] is not None:
                found["position"]["taken"] = self._taken
        self._go_on(found)
        if found is not None:
            set_rng_state(found["random"])
        loop = self._loop = StepLoop(self.run, self._checkpoint.saver(self.parts), self._every)
        if self._epoch < total:
            loop.leave_if(loop.begin(self.completed, max(total_steps, self.completed)), self.completed)
        while self._epoch < total:
            yield self._epoch
            self._epoch, self._taken = self._epoch + 1, 0
            if self._is_due:
                self._boundary(self._epoch == total)
        loop.end(self.completed)

    def _batches(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches that are left in this epoch."""
        if self._loop is None or not self._loop.has_begun:
            yield from own()
            return
        plain = self._plain_loader()
        if self._position is None or self._position.loader is not plain:
            self._position = LoaderPosition(plain, self._looks_ahead)
        found, self._found = self._found, None
        if found is not None and found["position"] is not None:
            self._position.load(found["position"], between=self._taken == 0)
        batches = self._position.begin(lambda: self._own_iterator(own))
        self._position.pass_over(lambda: next(batches))
        for batch in batches:
            try:
                yield batch
            except GeneratorExit:  # the script leaves the epoch after this batch
                self._taken, self._is_due = self._taken + 1, self._take_step() or self._is_due
                raise
            self._taken += 1
            if self._take_step():
                if self._is_last_batch():
                    self._is_due = True
                else:
                    self._boundary(False)

    def _take_step(self) -> bool:
        is_step = self._has_stepped()
        self.completed += is_step
        return is_step

    def section(self, name: str) -> Any:
        """Do something beside the steps, such as an evaluation: ``with steps.section("evaluation"):``."""
        return self.run.section(name)

    def log(self, **values: object) -> None:
        """Tell the launcher of numbers of the step under way, as ``run.log``."""
        self.run.log(self.completed + 1, **values)

    def _see_loss(self, owner: Any) -> None:
        """Tell the launcher of each loss that ``owner.backward`` takes."""

        def through(call: Callable[..., Any], loss: Any, *arguments: Any, **words: Any) -> Any:
            self.log(loss=loss)
            return call(loss, *arguments, **words)

        call_through(owner, "backward", through)

    def _boundary(self, is_last: bool) -> None:
        self._is_due = False
        assert self._loop is not None
        self._loop.leave_if(self._loop.boundary(self.completed, is_last), self.completed)


def _call_through(loader: Any, through: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]) -> None:
    """Have ``iter(loader)`` return ``through(…)`` of what it was. Python looks for it in the class of an object."""
    kind = type(loader)
    own = getattr(kind, "__iter__", None)
    if own is None:
        raise UsageError(f"this adapter takes the loader of training, not {kind.__name__}")
    watched = type(kind.__name__, (kind,), {"__iter__": lambda self: through(lambda: _each(own(self)))})
    try:
        object.__dict__["__class__"].__set__(loader, watched)  # Accelerate's loaders have a property of that name
    except TypeError as error:
        raise UsageError(f"this adapter takes a DataLoader, not {kind.__name__}") from error


def _each(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield what an iterator yields. ``iter`` of a loader that is its own iterator would begin it again."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch
