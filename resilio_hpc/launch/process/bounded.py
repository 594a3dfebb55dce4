"""Work in the run directory, whose file system may hang, for callers that go on without it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from resilio_hpc.core.bounded import begin
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.launch.process.announce import say

T = TypeVar("T")
PATIENCE_S = 20.0


def bounded(call: Callable[[], T], otherwise: T, patience_s: float = PATIENCE_S) -> T:
    """Return what ``call`` returns; ``otherwise`` when it fails or takes longer. A call that hangs is left behind."""
    future = begin(call)
    wait([future], patience_s)
    if not future.done():
        return otherwise
    try:
        return future.result()
    except (OSError, ResilioError) as error:
        say(f"the run directory cannot be used: {error}")
        return otherwise
