"""A question to Slurm that a thread asks again and again, so a late answer delays nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LEAST_S = 1.0  # between two questions


class Asking:
    """Runs a question repeatedly.

    ``question`` returns in how many seconds to ask again, ``least_s`` at least; None: never.
    """

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
        """Ask as soon as possible, after an event."""
        self._wake.set()

    def close(self) -> None:
        """Stop asking; a question that is on its way is left behind."""
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
