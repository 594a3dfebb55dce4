"""The random number generators of this process as plain values, so that each rank keeps its own in every layout."""

from __future__ import annotations

import random
import sys
from typing import Any

from resilio_hpc.core.errors import LayoutMismatch


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's (if loaded) and each CUDA device's (if used) generator."""
    state: dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [value.numpy().tobytes() for value in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set every generator that ``state`` (from rng_state) has. Raises LayoutMismatch for fewer CUDA devices."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in state:
        import numpy

        name, words, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(words, dtype=numpy.uint32), position, has_gauss, cached))
    if "torch" in state:
        import torch

        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state:
            if len(state["cuda"]) > torch.cuda.device_count():
                raise LayoutMismatch(
                    f"generators of {len(state['cuda'])} CUDA devices were saved, here are {torch.cuda.device_count()}"
                )
            for device, value in enumerate(state["cuda"]):
                torch.cuda.set_rng_state(_tensor(value), device)


def _tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
