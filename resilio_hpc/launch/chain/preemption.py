"""A job whose nodes Slurm is taking, and that it queues again: a rank that has saved waits for that.

With a GraceTime Slurm sends SIGTERM first and ends the job when the grace is over. A job that ends by itself in between
has FAILED or COMPLETED for Slurm, and is not requeued. So the launcher, with all ranks saved and ended, stays until
Slurm ends it. The site decides what happens then: requeue mode or cancel mode.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType

from msgspec import Struct

from resilio_hpc.launch.allocation import job_watch
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.client import commands

POLL_S = 2.0
ANSWER_S = 30.0  # for a slurmctld that does not answer: its SIGTERM came, so it was there
OVERDUE_S = 120.0  # Slurm looks for graces that are over every 30 s, and slurmctld may be away for a while


class Preemption(Struct, frozen=True):
    """A preemption under way. ``grace_s``: how long the job was given, by slurmctld's clock at both ends."""

    grace_s: float


def preemption(fields: Mapping[str, str]) -> Preemption | None:
    """Return the preemption, if the job's grace runs and Slurm may requeue it. ``fields``: ``scontrol show job``.

    Pure.

    A job that was cancelled, has ended, or is being requeued already is not RUNNING any more. A PreemptTime before
    StartTime is of an earlier run of the job.
    """
    if fields.get("JobState") != "RUNNING" or fields.get("Requeue") != "1":
        return None
    preempted, started, ends = (_time(fields, name) for name in ("PreemptTime", "StartTime", "EndTime"))
    if preempted is None or (started is not None and preempted < started):
        return None
    return Preemption(max(0.0, ends - preempted) if ends is not None else 0.0)


def _time(fields: Mapping[str, str], name: str) -> float | None:
    """Return a time in Unix seconds; None without one."""
    return job_watch.known_end(commands.parse_end(fields.get(name, "")))


class Stay:
    """Whether to wait for Slurm's end. Pure; monotonic seconds. ``told``: SIGTERM came, so Slurm has decided."""

    def __init__(self, now: float) -> None:
        self._answer_until = now + ANSWER_S
        self._until: float | None = None  # set once a grace is known

    def look(self, now: float, fields: Mapping[str, str], told: bool) -> bool:
        """Return whether to wait longer. ``fields``: of ``scontrol show job``, empty without an answer."""
        if told:
            return False
        if not fields:
            return now < (self._answer_until if self._until is None else self._until)
        found = preemption(fields)
        if found is None:
            return False
        if self._until is None:
            self._until = now + found.grace_s + OVERDUE_S
        return now < self._until


def under_way(job: str) -> bool:
    """Return whether Slurm says that the job's grace runs; False without an answer."""
    return preemption(commands.job_fields(job)) is not None


def stay_until_ended(
    job: str,
    ask: Callable[[str], Mapping[str, str]] = commands.job_fields,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait while the job's grace runs; return the seconds it took. Slurm's SIGKILL may end this process first."""
    told: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    began = clock()
    stay = Stay(began)
    said = False
    try:
        while stay.look(clock(), {} if told else ask(job), bool(told)):
            if not said:
                said = True
                say(f"job {job} is being preempted, and saved: it stays until Slurm requeues it")
            sleep(POLL_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return clock() - began
