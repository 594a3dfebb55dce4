"""Checkpoints: ``Checkpointer`` saves a run's whole state and restores it; see ``docs/`` and ``checkpointer.py``.

Names are loaded on first use: an agent or a saver uses few rooms of this package, and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilio_hpc.ckpt.audit import audit
    from resilio_hpc.ckpt.buckets import (
        DP_RESHARDABLE,
        FULLY_RESHARDABLE,
        BucketParameter,
        FlatBucket,
        optimizer_layouts,
    )
    from resilio_hpc.ckpt.checkpointer import Checkpointer
    from resilio_hpc.ckpt.coordination.agent_coordinator import EXIT_RESTORE_FAILED
    from resilio_hpc.ckpt.format.manifest import REPLICATED
    from resilio_hpc.ckpt.fsdp1 import fsdp_state
    from resilio_hpc.ckpt.handle import SaveHandle
    from resilio_hpc.ckpt.state.any_layout import AnyLayout
    from resilio_hpc.ckpt.state.flat_slab import FlatSlab
    from resilio_hpc.ckpt.state.rng import rng_state, set_rng_state
    from resilio_hpc.ckpt.state.slab import Slab

__all__ = [
    "DP_RESHARDABLE",
    "EXIT_RESTORE_FAILED",
    "FULLY_RESHARDABLE",
    "REPLICATED",
    "AnyLayout",
    "BucketParameter",
    "Checkpointer",
    "FlatBucket",
    "FlatSlab",
    "SaveHandle",
    "Slab",
    "audit",
    "fsdp_state",
    "optimizer_layouts",
    "rng_state",
    "set_rng_state",
]

_HOMES = {
    "Checkpointer": "checkpointer", "audit": "audit", "EXIT_RESTORE_FAILED": "coordination.agent_coordinator",
    "REPLICATED": "format.manifest", "SaveHandle": "handle", "Slab": "state.slab", "rng_state": "state.rng",
    "set_rng_state": "state.rng", "AnyLayout": "state.any_layout", "FlatSlab": "state.flat_slab",
    "FlatBucket": "buckets",
    "BucketParameter": "buckets", "optimizer_layouts": "buckets", "DP_RESHARDABLE": "buckets",
    "FULLY_RESHARDABLE": "buckets", "fsdp_state": "fsdp1",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
