"""A question to Slurm that is asked again and again, in a thread of its own: a late answer holds nothing up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LEAST_S = 1.0  # between two questions


class Asking:
    """``question`` asks once, and tells in how many seconds to ask again, ``least_s`` at least; None: never."""

    def __init__(self, name: str, question: Callable[[], float | None], least_s: float = LEAST_S) -> None:
        self._question = question
        self._least_s = least_s
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def look_now(self) -> None:
        """Something happened: ask as soon as may be."""
        self._wake.set()

    def close(self) -> None:
        """Ask no more; a question that is on its way is left to itself."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            pause_s = self._question()
            if pause_s is None:
                return
            self._wake.wait(pause_s)
            self._wake.clear()
            time.sleep(0 if self._closed else self._least_s)
