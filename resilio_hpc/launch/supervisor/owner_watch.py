"""Whether the job that a joiner's nodes help was cancelled, so that the run is over for them too.

A run may outlive its own job on the nodes of joiners. Agents that get ``scancel`` end the run in good order. After
``scancel -s KILL``, or with a KillWait that is too short for them, no agent is left to do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.launch.allocation.poller import LEAST_S, Asking
from resilio_hpc.launch.chain.predecessor import handover_of, part_state
from resilio_hpc.launch.rundir.run_claim import job_of

INTERVAL_S = 60.0
COMPLETING_S = 5.0  # until the next question while Slurm ends the job; doubled each time


@dataclass(frozen=True)
class OwnerState:
    """Slurm's state, and how a person cancelled the job: "" if none did, or it is unknown."""

    state: str
    cancelled: str = ""


def state_of(run_path: Path, part: str) -> OwnerState:
    """Return the state of the job that has this part of the run."""
    state, by = part_state(part)
    # the launcher itself cancels it after a handover
    if state != "CANCELLED" or handover_of(run_path, part) is not None:
        return OwnerState(state)
    return OwnerState(state, f"job {job_of(part)} was cancelled{f' by user {by}' if by else ''}")


class OwnerWatch(Asking):
    """Asks Slurm at intervals, and soon after ``look_now``; ``cancelled``: "" or how it was cancelled."""

    def __init__(
        self,
        ask: Callable[[], OwnerState],
        interval_s: float = INTERVAL_S,
        completing_s: float = COMPLETING_S,
        least_s: float = LEAST_S,
    ) -> None:
        super().__init__("owner watch", self._look, least_s)
        self.cancelled = ""
        self._ask = ask
        self._interval_s = interval_s
        self._completing_s = self._ending_s = completing_s

    def _look(self) -> float | None:
        owner = self._ask()
        self.cancelled = owner.cancelled
        if self.cancelled:
            return None
        if owner.state != "COMPLETING":
            self._ending_s = self._completing_s
            return self._interval_s
        pause_s = min(self._ending_s, self._interval_s)
        self._ending_s *= 2  # the job may hang in that state
        return pause_s
