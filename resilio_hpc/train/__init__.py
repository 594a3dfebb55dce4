"""What a training script may import; all of it is optional, and works without resilio-launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilio_hpc.train.batches import BatchPlan, accumulation_steps, keep_batch, scale_batch
from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.loader_position import LoaderPosition, TrackedLoader
from resilio_hpc.train.restartable import RoundOver, restartable
from resilio_hpc.train.run import Run, attach
from resilio_hpc.train.samples import SampleOrder

__all__ = [
    "BatchPlan", "LoaderPosition", "RoundOver", "Run", "SampleOrder", "StepGuard", "TrackedLoader",
    "accumulation_steps", "attach", "keep_batch", "restartable", "scale_batch", "warm_up_ddp",
]  # fmt: skip

if TYPE_CHECKING:
    from resilio_hpc.train.validation.step_guard import StepGuard


def __getattr__(name: str) -> Any:
    """Return what needs torch, which not every program has."""
    if name != "StepGuard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from resilio_hpc.train.validation.step_guard import StepGuard

    return StepGuard
