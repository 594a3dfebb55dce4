"""One deadline for all tests: only a hang reaches it, and its message shows what was awaited and the last state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOKS = 4  # a look that takes long, such as a command of Slurm's, takes a fifth of a processor's time

PATIENCE_S = 300.0
"""No test waits longer for one thing. A busy machine takes a tenth of it."""


def until(
    reached: Callable[[], T | None],
    what: str,
    state: Callable[[], object] = lambda: "",
    *,
    alive: Callable[[], bool] = lambda: True,
    patience_s: float = PATIENCE_S,
    poll_s: float = 0.02,
) -> T:
    """Call ``reached`` until it returns something true, and return that.

    Raises AssertionError with ``what`` was awaited, the last value and ``state()`` after ``patience_s``, or as soon as
    ``alive()`` is false and ``reached()`` still is.
    """
    deadline = time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        living = alive()  # before the look: what ends may have reached it first
        found = reached()
        if found:
            return found
        if not living or time.monotonic() > deadline:
            why = f"not within {patience_s:g} s" if living else "what should bring it has ended"
            raise AssertionError(f"{what}: {why}; last: {found!r}\n{state()}")
        time.sleep(max(poll_s, LOOKS * (time.monotonic() - began)))
