"""DeepSpeed's ZeRO 1, 2 and 3: agreed stops, saves in the background, exact resume, other numbers of ranks (NVX-8).

    from resilio_hpc.frameworks.deepspeed import DeepSpeedSteps

    steps = DeepSpeedSteps(engine, loader, every=100)  # after deepspeed.initialize
    for epoch in steps.epochs(3):
        for batch in loader:
            ...

A step is one of the optimizer: a call of ``engine.step()`` that ends an accumulation of gradients. See
docs/frameworks.md.
"""

from __future__ import annotations

import os
from typing import Any

from resilio_hpc.core.errors import LayoutMismatch, UsageError
from resilio_hpc.frameworks.epoch_steps import EpochSteps
from resilio_hpc.frameworks.zero_state import ZeroState


class DeepSpeedSteps(EpochSteps):
    """Epochs of a script with an ``engine`` of ``deepspeed.initialize``.

    ``loader``: torch's DataLoader, or the one that ``initialize`` has returned. ``every``: save after so many steps (0:
    only at the end, at a stop, and when an exception ends the ranks). ``directory`` and ``options`` are the
    Checkpointer's. Raises UsageError for what is partitioned in other ways than by ZeRO's data parallelism.
    """

    def __init__(
        self,
        engine: Any,
        loader: Any,
        every: int = 100,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self._engine, self._state = engine, ZeroState(engine)
        self._plain = _plain_loader_of(loader)
        super().__init__(loader, every, directory, None, options)
        self._see_loss(engine)

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored: parts of parameters, and objects for all that is small."""
        return {**self._state.parts(), "steps": self}

    def _restore(self) -> None:
        state = self._state
        is_new = state.make_optimizer_state()
        try:
            restored = self._checkpoint.restore(self.parts())
        except LayoutMismatch:
            if not is_new:
                raise
            state.drop_optimizer_state()  # as of a run that was stopped before its first step
            restored = self._checkpoint.restore(self.parts())
        if restored is not None:
            state.put_into_model()
        elif is_new:
            state.drop_optimizer_state()

    def _has_stepped(self) -> bool:
        return bool(self._engine.global_steps > self.completed)

    def _plain_loader(self) -> Any:
        return self._plain


def _plain_loader_of(loader: Any) -> Any:
    """Return torch's DataLoader. DeepSpeed's own loader makes one for each epoch: from here on, it keeps one."""
    if type(loader).__name__ != "DeepSpeedDataLoader":
        return loader
    if loader.curriculum_learning_enabled:
        raise UsageError("this adapter does not know the position in a loader of curriculum learning")
    from torch.utils.data import DataLoader

    plain = DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=loader.data_sampler, collate_fn=loader.collate_fn,
        num_workers=loader.num_local_io_workers, pin_memory=loader.pin_memory, drop_last=loader.dataloader_drop_last,
    )  # fmt: skip
    loader._create_dataloader = lambda: setattr(loader, "data", iter(plain))
    return plain
