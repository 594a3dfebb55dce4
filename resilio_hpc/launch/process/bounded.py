"""Calls that may hang with their file system, made in a thread of their own and waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.launch.process.announce import say

T = TypeVar("T")
PATIENCE_S = 20.0


def bounded(call: Callable[[], T], otherwise: T, patience_s: float = PATIENCE_S) -> T:
    """What ``call`` returns; ``otherwise`` when it failed or takes longer, and is then left to itself."""
    answers: list[T] = []

    def answer() -> None:
        try:
            answers.append(call())
        except (OSError, ResilioError) as error:
            say(f"the run directory cannot be used: {error}")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else otherwise
