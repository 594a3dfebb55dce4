"""The random number generators of this process as plain values, so that each rank keeps its own in every layout."""

from __future__ import annotations

import random
import sys
from typing import Any

from resilio_hpc.ckpt.devices.registry import DEVICES

_CPU = "torch"
"""The CPU's generator of torch in a state; those of devices are under their kinds, such as "cuda"."""


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's (if loaded) and each device's (if used) generator."""
    state: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    return state | {_CPU if kind == "cpu" else kind: found for kind, found in DEVICES.rng_states().items()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set every generator that ``state`` (from rng_state) has.

    Raises LayoutMismatch for generators of devices that are not here.
    """
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in state:
        import numpy

        name, words, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(words, dtype=numpy.uint32), position, has_gauss, cached))
    others = {kind: value for kind, value in state.items() if kind not in ("python", "numpy")}
    DEVICES.set_rng_states({"cpu" if kind == _CPU else kind: value for kind, value in others.items()})
