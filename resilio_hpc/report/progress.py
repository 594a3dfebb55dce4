"""How far a run is: of how many steps, until when, and the values that its script logs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.report.status import Status

KINDS = frozenset({"steps_planned", "logged", "end_time", "successor", "launch", "first_step"})
SHORT_S = 5.0  # a round is younger: its average pace says little yet
MOST_POINTS = 1_000


@dataclass(frozen=True)
class LoggedPoint:
    """What the script has logged at a time (Unix seconds). ``rates``: amounts per second, by name (tokens, samples)."""

    time: float
    step: int
    values: Mapping[str, float]
    rates: Mapping[str, float]
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunProgress:
    """How far a run is. None, "": not known.

    ``total``: steps in all; ``left_s``: until the last step, at this round's pace; ``job_left_s``: until the job's time
    limit; ``next_job``: of the chain; ``points``: what is logged, at most about a thousand, by time.
    """

    step: int | None = None
    total: int | None = None
    left_s: float | None = None
    job_left_s: float | None = None
    next_job: str = ""
    points: tuple[LoggedPoint, ...] = field(default=(), repr=False)


def progress(events: Sequence[Event], status: Status | None, now: float) -> RunProgress:
    """Return the progress at ``now``. ``events`` by time; ``status``: of the newest job, while it has not ended."""
    total: int | None = None
    end: float | None = None
    first: tuple[float, int] | None = None
    next_job = ""
    for event in events:
        if event.kind not in KINDS:
            continue
        f = Fields(event.fields)
        if event.kind == "launch":
            end, next_job, first = f.time("end_time"), "", None
        elif event.kind == "steps_planned":
            total = f.whole("total")
        elif event.kind == "end_time":
            end = f.time("end_time") or end
        elif event.kind == "first_step":
            first = (event.time, f.whole("step") or 0)
        elif event.kind == "successor" and f.data.get("acted", True) is not False:
            next_job = printable(f.text("job"), 40)
    step = status.step if status is not None else None
    left_s = None
    if status is not None and step is not None and total is not None and status.phase == "running":
        left_s = _left_s(status, step, total, first)
    job_left_s = max(0.0, end - now) if end is not None and status is not None else None
    return RunProgress(step, total, left_s, job_left_s, next_job, tuple(logged_points(events)))


def _left_s(status: Status, step: int, total: int, first: tuple[float, int] | None) -> float | None:
    if status.stalled_s is not None or step > total:
        return None
    if first is not None and status.time - first[0] > SHORT_S and step > first[1]:
        return (total - step) * (status.time - first[0]) / (step - first[1])
    return (total - step) / status.steps_per_s if status.steps_per_s else None


def logged_points(events: Sequence[Event]) -> list[LoggedPoint]:
    """Return what the script has logged, thinned to about a thousand points. ``events`` by time."""
    lines = [event for event in events if event.kind == "logged"]
    ranks = [rank for event in lines if (rank := Fields(event.fields).whole("rank")) is not None]
    least = min(ranks, default=0)  # of several pipeline stages that log, one
    lines = [event for event in lines if Fields(event.fields).whole("rank") == least]
    every = max(1, -(-len(lines) // MOST_POINTS))
    return [_point(event) for number, event in enumerate(lines) if number % every == 0 or number == len(lines) - 1]


def _point(event: Event) -> LoggedPoint:
    f = Fields(event.fields)
    seconds = f.number("seconds") or 0.0
    sums = _numbers(f.inner("sums"))
    rates = {name: value / seconds for name, value in sums.items()} if seconds > 0 else {}
    bad = tuple(printable(name, 32) for name in f.texts("not_finite")[:8])
    return LoggedPoint(event.time, f.whole("step") or 0, _numbers(f.inner("values")), rates, bad)


def _numbers(f: Fields) -> dict[str, float]:
    names = list(f.data)[:8]
    return {printable(name, 32): value for name in names if (value := f.number(name)) is not None}
