"""Hugging Face's Accelerate: agreed stops, saves of the last finished step, exact resume, sections (NVX-8).

    from resilio_hpc.frameworks.accelerate import AcceleratedSteps

    steps = AcceleratedSteps(accelerator, loader, every=100)  # after accelerator.prepare
    for epoch in steps.epochs(3):
        for batch in loader:
            ...

A step is a batch with which gradients were synchronised. It ends with the body of the loop; an epoch's last one ends
with the body of the epoch, so that an evaluation there belongs to it. See docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard

from resilio_hpc.ckpt import REPLICATED
from resilio_hpc.core.errors import UsageError
from resilio_hpc.frameworks.epoch_steps import EpochSteps
from resilio_hpc.train.exact_resume import ddp_wrappers, warm_up_ddp

_KNOWN = ("NO", "MULTI_CPU", "MULTI_GPU")


class AcceleratedSteps(EpochSteps):
    """Epochs of a script that has prepared its objects, ``loader`` among them, with ``accelerator``.

    What is saved: all that was prepared, or given to ``register_for_checkpointing``. ``every``: save after so many
    steps (0: only at the end, at a stop, and when ranks cannot go on). ``directory`` and ``options`` are the
    Checkpointer's. Raises UsageError for FSDP, DeepSpeed and Megatron, whose state is not known here, and for
    a StatefulDataLoader.
    """

    _looks_ahead = True

    def __init__(
        self,
        accelerator: Any,
        loader: Any,
        every: int = 100,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        kind = accelerator.distributed_type.name
        if kind not in _KNOWN:
            raise UsageError(f"AcceleratedSteps knows one device and DDP, not {kind}")
        if not isinstance(loader, DataLoaderShard):
            raise UsageError(
                f"AcceleratedSteps takes a loader that accelerator.prepare made, not {type(loader).__name__}"
            )
        if hasattr(loader.base_dataloader, "load_state_dict"):
            raise UsageError(
                "AcceleratedSteps keeps the position of torch's DataLoader: leave use_stateful_dataloader out; with "
                "it, a run did not go on with the same bits"
            )
        self._accelerator = accelerator
        super().__init__(loader, every, directory, REPLICATED, options)
        self._see_loss(accelerator)

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
        return {**super().state_dict(), "accumulated": self._accelerator.step}

    def _go_on(self, found: dict[str, Any] | None) -> None:
        if found is not None:
            self._accelerator.step = found["accumulated"]
        for wrapper in ddp_wrappers(self._accelerator._models):
            warm_up_ddp(wrapper)

    def _has_stepped(self) -> bool:
        return bool(self._accelerator.sync_gradients)

    def _is_last_batch(self) -> bool:
        return bool(self._loader.end_of_dataloader)

    def _plain_loader(self) -> Any:
        return self._loader.base_dataloader

    def _own_iterator(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._loader.set_epoch(self._epoch)
        return own()
