"""How long Python's garbage collector has worked in this process."""

from __future__ import annotations

import gc
import time

_began = _total = 0.0


def begin() -> None:
    """Measure from now on. Costs two readings of the clock for each collection."""
    if _note not in gc.callbacks:
        gc.callbacks.append(_note)


def seconds() -> float:
    """Return the seconds of all collections since ``begin``."""
    return _total


def _note(phase: str, _info: object) -> None:
    global _began, _total
    now = time.perf_counter()
    if phase == "start":
        _began = now
    elif _began:
        _total += now - _began
