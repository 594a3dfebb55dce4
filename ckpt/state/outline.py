"""A state without its tensors and torch's objects: what is a rank's own where ranks hold the same tensors.

Models, optimizers, schedules of learning rates and scalers of gradients are the same on all ranks.

With another rank's saved state, which has the tensors, it gives this rank's (``format.outlines``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from resilio_hpc.ckpt.state import overlap, tensors, tree
from resilio_hpc.ckpt.state.paths import LEFT_OUT
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.watched import is_module, is_scaler, is_schedule


def outline(state: Any) -> bytes:
    """Return the JSON text of ``state``, in which tensors, modules and optimizers are left out. Raises UsageError."""
    return msgspec.json.encode(_Outliner().encode(state, ()))


class _Outliner(tree.Encoder):
    """Encodes all but tensors and torch's objects."""

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        is_shared = is_module(value) or overlap.is_optimizer(value) or is_schedule(value) or is_scaler(value)
        if is_shared or tensors.is_tensor(value) or type(value) is Slab:
            return LEFT_OUT
        return super().encode(value, path)
