"""Goodput: the share of a run's time in which training moved forward (OPS-6). Pure.

    goodput = useful time / total time

**Total** time is the time that the run's jobs ran, from each job's launch to its end; time in Slurm's queue between the
jobs of a chain is told apart (``queued_s``). **Useful** is the time of each round from the moment when all its ranks
had done their first step until its end or its first failure, minus the part whose steps had to be done again because
ranks were restored from an earlier step, and minus the time in which the controller saw no steps for too long
(``stalled``), from the last step on, and the time in which ranks paused for a test of the nodes. What is left over is
start-up, recovery and closing; the parts add up to the total. Time that training itself spends on saving counts as
useful: it is the price of a step.

Where a script reports no steps, a round counts from the start of its ranks, and steps done again cannot be told
(``steps_known`` is False): the share is then an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event


@dataclass(frozen=True)
class Goodput:
    """Goodput of a run. All times in seconds.

    ``useful_s + redone_s + stalled_s + startup_s + recovery_s + closing_s == total_s``.
    """

    total_s: float
    useful_s: float
    redone_s: float
    startup_s: float
    recovery_s: float
    closing_s: float
    queued_s: float
    jobs: int
    rounds: int
    steps_known: bool
    stalled_s: float = 0.0

    @property
    def share(self) -> float | None:
        """Return useful time / total time, 0 to 1; None when no time has passed."""
        return self.useful_s / self.total_s if self.total_s > 0 else None


@dataclass
class _Round:
    number: int
    members: tuple[str, ...]
    began: float
    started: float | None = None  # the last node's ranks run
    first: float | None = None  # all ranks have done their first step
    first_step: int = 0
    restored: int = 0
    failed: float = math.inf
    reached: int | None = None  # the last step that is known to be done
    commits: list[tuple[float, int]] = field(default_factory=list)
    stalled_step: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)  # without steps; the last may go on to the end


@dataclass
class _Job:
    name: str
    began: float
    ended: float
    over: bool = False
    finished: float = math.inf  # its verdict
    final_step: float = math.inf  # the last durable step, where the job did not complete the run
    rounds: list[_Round] = field(default_factory=list)


def goodput(events: Iterable[Event], now: float | None = None) -> Goodput:
    """Return the goodput of a run so far.

    ``events`` by time; ``now``: until when a job that has not ended is known to run.
    """
    jobs = _jobs(list(events))
    if jobs and now is not None and not jobs[-1].over:
        jobs[-1].ended = max(jobs[-1].ended, now)
    rounds = [one for job in jobs for one in job.rounds]
    steps_known = any(one.first is not None for one in rounds)
    parts = _Parts(steps_known)
    limit = math.inf  # steps above it were or will be done again
    for job in reversed(jobs):
        limit = parts.add(job, job.final_step if limit == math.inf else limit)
    queued = sum(max(0.0, later.began - earlier.ended) for earlier, later in pairwise(jobs))
    return Goodput(
        parts.total, parts.useful, parts.redone, parts.startup, parts.recovery, parts.closing, queued, len(jobs),
        len(rounds), steps_known, parts.stalled,
    )  # fmt: skip


class _Parts:
    def __init__(self, steps_known: bool) -> None:
        self.total = self.useful = self.redone = self.startup = self.recovery = self.closing = self.stalled = 0.0
        self._steps_known = steps_known

    def add(self, job: _Job, limit: float) -> float:
        """Add a job's time; later jobs went on from step ``limit``. Return the limit for the jobs before."""
        spans = self._spans(job)
        self.total += job.ended - job.began
        at = job.began
        for index, (_, begin, end) in enumerate(spans):
            if index:
                self.recovery += begin - at
            else:
                self.startup += begin - at
            at = end
        if spans:
            self.closing += job.ended - at
        else:
            self.startup += job.ended - at
        for one, begin, end in reversed(spans):
            stalled = sum(max(0.0, min(until, end) - max(since, begin)) for since, until in one.stalls)
            moving = max(0.0, end - begin - stalled)
            useful = moving * (_kept(one, begin, end, limit) if self._steps_known else 1.0)
            self.useful += useful
            self.redone += moving - useful
            self.stalled += end - begin - moving
            limit = min(limit, one.restored)
        return limit

    def _spans(self, job: _Job) -> list[tuple[_Round, float, float]]:
        spans: list[tuple[_Round, float, float]] = []
        at = job.began
        for index, one in enumerate(job.rounds):
            begin = one.first if self._steps_known else one.started
            if begin is None:
                continue
            following = job.rounds[index + 1].began if index + 1 < len(job.rounds) else math.inf
            begin = min(max(begin, at), job.ended)
            end = max(begin, min(one.failed, following, job.finished, job.ended))
            spans.append((one, begin, end))
            at = end
        return spans


def _kept(one: _Round, begin: float, end: float, limit: float) -> float:
    """Return the share of a round's time that made steps up to ``limit``."""
    if one.reached is not None and limit >= one.reached:
        return 1.0
    if limit < one.first_step:
        return 0.0
    if one.reached is not None and one.reached > one.first_step:
        return (limit - one.first_step) / (one.reached - one.first_step)
    durable = next((at for at, step in one.commits if step >= limit), end)
    return (min(max(durable, begin), end) - begin) / (end - begin) if end > begin else 1.0


def _jobs(events: list[Event]) -> list[_Job]:
    names = list(dict.fromkeys(Fields(event.fields).text("job") for event in events if event.kind == "launch"))
    jobs: dict[str, _Job] = {}
    for event in events:
        fitting = [name for name in names if event.writer.startswith(f"{name}-")]
        name = max(fitting, key=len, default="")
        if not name and names:
            continue
        job = jobs.setdefault(name, _Job(name, event.time, event.time))
        job.ended = max(job.ended, event.time)
        _note(job, event, Fields(event.fields))
    return sorted(jobs.values(), key=lambda job: job.began)


def _note(job: _Job, event: Event, f: Fields) -> None:
    at, number = event.time, f.whole("round")
    current = job.rounds[-1] if job.rounds else None
    if event.kind == "round" and number is not None:
        job.rounds.append(_Round(number, f.texts("members"), at))
    elif event.kind == "launch_ends":
        job.over = True
    elif event.kind == "verdict":
        job.over, job.finished = True, min(job.finished, at)
        committed = f.whole("committed")
        if f.text("verdict") != "completed" and committed is not None and committed >= 0:
            job.final_step = committed
    elif current is not None:
        _note_round(job, current, event, f)


def _note_round(job: _Job, current: _Round, event: Event, f: Fields) -> None:
    at, number = event.time, f.whole("round")
    if event.kind == "ranks_started" and number == current.number:
        current.started = at
    elif event.kind == "first_step" and number == current.number:
        current.first = at
        current.first_step, current.restored = f.whole("step") or 0, max(f.whole("restored") or 0, 0)
    elif event.kind == "rank_failed" and f.data.get("alone") is not True:
        for one in job.rounds:
            if one.number == number:
                one.failed = min(one.failed, at)
    elif event.kind == "node_lost" and f.text("node") in current.members:
        current.failed = min(current.failed, at - (f.number("silent_s") or 0.0))
    elif event.kind in ("agent_ended", "agent_left") and f.text("node") in current.members:
        current.failed = min(current.failed, at)
    elif event.kind == "stalled" and number == current.number:
        current.stalls.append((at - (f.number("silent_s") or 0.0), math.inf))
        current.stalled_step = f.whole("step") or 0
    elif event.kind == "paused" and number == current.number:
        current.stalls.append((at, math.inf))
        current.stalled_step = f.whole("step") or 0
    elif event.kind in ("goes_on", "pause_ended") and number == current.number and current.stalls:
        current.stalls[-1] = (current.stalls[-1][0], at)
    elif event.kind == "committed":
        if current.stalls and current.stalls[-1][1] == math.inf and (f.whole("step") or 0) > current.stalled_step:
            current.stalls[-1] = (current.stalls[-1][0], at)  # the steps go on, which another controller saw
        current.commits.append((at, f.whole("step") or 0))
    elif event.kind == "stop_agreed":
        current.reached = f.whole("step")
    elif event.kind == "recovered" and f.whole("lost_steps") is not None:
        before = [one for one in job.rounds if one.number < (number or 0) and one.first is not None]
        if before:
            before[-1].reached = (f.whole("lost_steps") or 0) + max(f.whole("restored") or 0, 0)
