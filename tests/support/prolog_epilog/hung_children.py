"""Children that hang, and are given up as soon as they do: no test waits for a budget to be over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resilio_hpc.prolog_epilog.base.isolated import Child, Mark
from tests.support.waiting import PATIENCE_S, until


def hung_child(work: Callable[[Mark], bytes], budget_s: float, **more: Any) -> Child:
    """Start ``work``, which touches something and hangs there; its time is up once it has touched it."""
    assert budget_s < PATIENCE_S
    child = Child(work, PATIENCE_S, **more)
    until(child._touched, "the child touches something", poll_s=0.001)
    child.deadline = time.monotonic()
    return child
