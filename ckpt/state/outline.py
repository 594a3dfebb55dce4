"""A state without its tensors and torch's objects: what is a rank's own where ranks hold the same tensors.

With another rank's saved state, which has the tensors, it gives this rank's (``format.outlines``).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from resilio_hpc.ckpt.state import overlap, tensors, tree
from resilio_hpc.ckpt.state.paths import LEFT_OUT
from resilio_hpc.ckpt.state.slab import Slab


def outline(state: Any) -> bytes:
    """Return the JSON text of ``state``, in which tensors, modules and optimizers are left out. Raises UsageError."""
    return msgspec.json.encode(_Outliner().encode(state, ()))


class _Outliner(tree.Encoder):
    """Encodes all but tensors and torch's objects."""

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        torch = sys.modules.get("torch")
        if tensors.is_tensor(value) or type(value) is Slab or overlap.is_optimizer(value):
            return LEFT_OUT
        if torch is not None and isinstance(value, torch.nn.Module):
            return LEFT_OUT
        return super().encode(value, path)
