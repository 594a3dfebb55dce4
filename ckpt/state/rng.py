"""The random number generators of this process as plain values, so that each rank keeps its own in every layout."""

from __future__ import annotations

import random
import sys
from typing import Any

from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.core.errors import LayoutMismatch

_CPU = "torch"
"""The CPU's generator of torch in a state; those of devices are under their kinds, such as "cuda"."""


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's (if loaded) and each device's (if used) generator."""
    state: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            found = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
        state["numpy"] = found  # a dict for one that numpy.random.set_bit_generator() has chosen
    return state | {_CPU if kind == "cpu" else kind: found for kind, found in DEVICES.rng_states().items()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set every generator that ``state`` (from rng_state) has.

    Raises LayoutMismatch for generators of devices that are not here, and of numpy's of another kind.
    """
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    if "numpy" in state:
        import numpy

        found = state["numpy"]
        if not isinstance(found, dict):
            name, words, position, has_gauss, cached = found
            found = name, numpy.frombuffer(words, dtype=numpy.uint32), position, has_gauss, cached
        try:
            numpy.random.set_state(found)
        except ValueError as error:  # of another kind
            raise LayoutMismatch(f"the state of numpy's generator does not fit the one in use: {error}") from error
    others = {kind: value for kind, value in state.items() if kind not in ("python", "numpy")}
    DEVICES.set_rng_states({"cpu" if kind == _CPU else kind: value for kind, value in others.items()})
