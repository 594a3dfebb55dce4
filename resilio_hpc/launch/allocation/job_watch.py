"""What Slurm says of this job while it runs: its nodes and its end, which both may change.

Slurm is asked once a minute, and at once after an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.launch.allocation.poller import LEAST_S, Asking
from resilio_hpc.slurm.client.commands import parse_end
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.runner import run_here

INTERVAL_S = 60.0
RETRY_S = 5.0  # after a question without an answer
TIMEOUT_S = 20.0
GOING_ON = ("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED")


class JobView(Struct, frozen=True):
    """The job's nodes now, and when its time limit ends it: Unix seconds, ``math.inf``: never, None: not known."""

    nodes: tuple[str, ...]
    end_time: float | None


def parse_view(text: str, job: str) -> JobView | None:
    """Return the view in ``squeue -o "%A|%N|%e|%T"``, which lists all tasks of a job array under its number. Pure.

    For a job that Slurm is ending, such as a cancelled one, it shows the present moment as its end, and fewer nodes.
    """
    for line in text.splitlines():
        number, nodes, end, state = ([*line.split("|"), "", "", ""])[:4]
        if number.strip() != job or not nodes.strip() or state.strip() not in GOING_ON:
            continue
        try:
            return JobView(tuple(expand(nodes)), parse_end(end))
        except UsageError:
            return None
    return None


def known_end(end_time: float | None) -> float | None:
    """Return the end that agents count with; None where it has none or it is not known. Pure."""
    return end_time if end_time is not None and math.isfinite(end_time) else None


def ask(job: str) -> JobView | None:
    """Ask Slurm; return None when it does not answer, or does not know the job."""
    try:
        return parse_view(run_here(["squeue", "-h", "-j", job, "-o", "%A|%N|%e|%T"], TIMEOUT_S).stdout, job)
    except CommandError:
        return None


class JobWatch(Asking):
    """Asks about one job. ``view``: the last answer; ``answering``: whether the last question was answered."""

    def __init__(
        self,
        job: str,
        ask: Callable[[str], JobView | None] = ask,
        interval_s: float = INTERVAL_S,
        least_s: float = LEAST_S,
    ) -> None:
        super().__init__("job watch", self._look, least_s)
        self.view: JobView | None = None
        self.answering = True
        self.answers = 0  # the number of answers
        self._job = job
        self._ask = ask
        self._interval = interval_s

    def _look(self) -> float:
        view = self._ask(self._job)
        self.answering = view is not None
        if view is None:
            return RETRY_S
        self.view = view
        self.answers += 1
        return self._interval
