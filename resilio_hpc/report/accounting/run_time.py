"""The wall clock of a whole run, over all jobs of its chain: one cause for every microsecond. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import (
    TimeCause,
    TimeSpan,
    apart,
    covered,
    gaps,
    merged,
    microseconds,
    totals,
)
from resilio_hpc.report.accounting.doubtful_times import believed
from resilio_hpc.report.accounting.part_facts import Moment, PartFacts, parts_of
from resilio_hpc.report.accounting.part_spans import PartSpans


@dataclass(frozen=True)
class PartTime:
    """A part of the run and its spans, without a gap from its beginning to its end."""

    facts: PartFacts
    spans: tuple[TimeSpan, ...]


@dataclass(frozen=True)
class RunTime:
    """Where a run's time went.

    ``spans``: of the wall clock, by time, without gap or overlap. ``parts``: each job's own; they may overlap.
    ``steps_known``: ranks report steps; without that, what is said of training is an upper bound.
    """

    spans: tuple[TimeSpan, ...]
    parts: tuple[PartTime, ...]
    steps_known: bool

    @property
    def wall_us(self) -> int:
        """Return the length of the wall clock."""
        return self.spans[-1].end_us - self.spans[0].begin_us if self.spans else 0

    @property
    def jobs_us(self) -> int:
        """Return how long jobs were running; jobs that overlap count each."""
        return sum(span.us for part in self.parts for span in part.spans)

    @property
    def useful_us(self) -> int:
        """Return how long training moved forward."""
        sums = totals(span for part in self.parts for span in part.spans)
        return sums[TimeCause.TRAIN] + sums[TimeCause.SAVE]

    @property
    def goodput(self) -> float | None:
        """Return goodput, 0 to 1; None where no time has passed."""
        return self.useful_us / self.jobs_us if self.jobs_us else None

    @property
    def ettr(self) -> float | None:
        """Return the effective training time ratio, 0 to 1; None where no time has passed."""
        return totals(self.spans)[TimeCause.TRAIN] / self.wall_us if self.wall_us else None


def run_time(events: Sequence[Event], now: float | None = None) -> RunTime:
    """Return where the time went.

    ``events`` by time, of all jobs; ``now``: until when a job that has not ended is known to run (Unix seconds).
    """
    known, doubts = believed(events)
    parts, strays = parts_of(known)
    if parts and now is not None and parts[-1].over is None:
        last = parts[-1]
        last.ended = max(last.ended, Moment(microseconds(now), last.ended.line), key=lambda moment: moment.us)
    steps_known = any(one.first is not None for part in parts for one in part.rounds)
    maker = PartSpans(steps_known)
    times = [PartTime(part, tuple(covered(maker.of(part), doubts))) for part in reversed(parts)][::-1]
    return RunTime(tuple(_wall(times, strays)), tuple(times), steps_known)


def _wall(parts: Sequence[PartTime], strays: Sequence[Event]) -> list[TimeSpan]:
    found: list[TimeSpan] = []
    for part in parts:
        spans = list(part.spans)
        if not spans:
            continue
        if found and spans[0].begin_us < found[-1].end_us:
            since = spans[0].begin_us
            before = [span for span in found if span.end_us <= since]
            found = before + merged(found[len(before) :], spans)
        else:
            found += spans
    return _filled(found, parts, strays)


def _filled(spans: list[TimeSpan], parts: Sequence[PartTime], strays: Sequence[Event]) -> list[TimeSpan]:
    """Return the spans with those between the jobs."""
    between: list[TimeSpan] = []
    for begin, end in gaps(spans):
        before = max((part.facts for part in parts if part.facts.ended.us <= begin), key=lambda part: part.ended.us)
        after = next(part.facts for part in parts if part.facts.began.us >= end)
        if before.over is not None:
            cause, why, first = TimeCause.QUEUE, "the next job has not begun", before.over.line
        elif before.heard is not None:
            cause, why = TimeCause.QUEUE, "nothing is heard of the job before any more, and the next has not begun"
            first = before.heard.line
        else:
            cause, why, first = TimeCause.UNKNOWN, "it is not recorded when the job before ended", before.ended.line
        gap = [TimeSpan(begin, end, cause, why, (first, after.began.line))]
        between += covered(gap, _of_strays(strays))
    return sorted([*spans, *between], key=lambda span: span.begin_us)


def _of_strays(strays: Sequence[Event]) -> list[TimeSpan]:
    """Return the times of lines that belong to no job whose launch is known."""
    by_writer: dict[str, list[Event]] = {}
    for event in strays:
        by_writer.setdefault(event.writer, []).append(event)
    return apart([
        TimeSpan(
            microseconds(lines[0].time), microseconds(lines[-1].time), TimeCause.UNKNOWN,
            "lines of a job whose launch is not recorded", (lines[0], lines[-1]),
        )
        for lines in by_writer.values()
    ])  # fmt: skip
