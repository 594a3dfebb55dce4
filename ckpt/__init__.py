"""Checkpoints: ``Checkpointer`` saves a run's whole state and restores it; see ``docs/`` and ``checkpointer.py``.

Names are loaded on first use: an agent or a saver uses few rooms of this package, and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilio_hpc.ckpt.audit import audit
    from resilio_hpc.ckpt.checkpointer import Checkpointer
    from resilio_hpc.ckpt.coordination.agent_coordinator import EXIT_RESTORE_FAILED
    from resilio_hpc.ckpt.format.manifest import REPLICATED
    from resilio_hpc.ckpt.handle import SaveHandle
    from resilio_hpc.ckpt.state.rng import rng_state, set_rng_state
    from resilio_hpc.ckpt.state.slab import Slab

__all__ = [
    "EXIT_RESTORE_FAILED",
    "REPLICATED",
    "Checkpointer",
    "SaveHandle",
    "Slab",
    "audit",
    "rng_state",
    "set_rng_state",
]

_HOMES = {
    "Checkpointer": "checkpointer", "audit": "audit", "EXIT_RESTORE_FAILED": "coordination.agent_coordinator",
    "REPLICATED": "format.manifest", "SaveHandle": "handle", "Slab": "state.slab", "rng_state": "state.rng",
    "set_rng_state": "state.rng",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
