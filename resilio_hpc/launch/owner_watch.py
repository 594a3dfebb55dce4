"""Whether the job that a joiner's nodes help was cancelled: then the run is over for them, too.

A run outlives its own job's nodes on those of joiners, which nobody else would tell: agents that hear ``scancel`` end
the run in good order, but after ``scancel -s KILL``, or a KillWait that is too short for them, none is left to do so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.launch.predecessor import handover_of, part_state

INTERVAL_S = 60.0
COMPLETING_S = 5.0  # until the next question while Slurm is ending it


@dataclass(frozen=True)
class OwnerState:
    """Slurm's word, and how a person cancelled the job: "" where nobody did, or nobody can tell."""

    state: str
    cancelled: str = ""


def state_of(run_path: Path, part: str) -> OwnerState:
    """Of the job that has this part of the run."""
    state, by = part_state(part)
    if state != "CANCELLED" or handover_of(run_path, part) is not None:  # which we cancel ourselves
        return OwnerState(state)
    return OwnerState(state, f"job {part.partition('r')[0]} was cancelled{f' by user {by}' if by else ''}")


class OwnerWatch:
    """Asks once in a while, and soon after ``look_now``; ``cancelled`` is "" or how that was.

    Slurm and the run directory are asked in a thread of its own, and hold nobody up."""

    def __init__(self, ask: Callable[[], OwnerState], interval_s: float = INTERVAL_S) -> None:
        self.cancelled = ""
        self._ask = ask
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="owner watch", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def look_now(self) -> None:
        """Somebody else leads the run: ask as soon as may be."""
        self._wake.set()

    def close(self) -> None:
        """Ask no more."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            owner = self._ask()
            self.cancelled = owner.cancelled
            if self.cancelled:
                return
            self._wake.wait(min(COMPLETING_S, self._interval_s) if owner.state == "COMPLETING" else self._interval_s)
            self._wake.clear()
