"""The causes of time, their definitions, and spans of time with the ledger lines behind them. Pure.

Times are whole microseconds since 1970, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from resilio_hpc.core.ledger import Event

US = 1_000_000


class TimeCause(str, Enum):
    """What a span of time was spent on."""

    TRAIN = "train"
    SAVE = "save"
    REPEATED = "repeated"
    LOAD = "load"
    STALLED = "stalled"
    DETECT = "detect"
    RECOVER = "recover"
    START = "start"
    IDLE = "idle"
    QUEUE = "queue"
    UNKNOWN = "unknown"


DEFINITIONS: dict[TimeCause, str] = {
    TimeCause.TRAIN: "Ranks make steps that last: from the moment when all ranks of a round have done their first step "
    "until the round's end or its first failure, less what the other rows have.",
    TimeCause.SAVE: "Training waits for a snapshot (blocked_s of the slowest rank), or all ranks have ended and a last "
    "checkpoint is still being written.",
    TimeCause.REPEATED: "Steps that were done and did not last: ranks were restored from an earlier step afterwards.",
    TimeCause.LOAD: "The slowest rank reads the state from which it goes on (restore_s).",
    TimeCause.STALLED: "Ranks live, and no step was done for longer than the run's learned limit, or ranks paused for "
    "a test of their nodes.",
    TimeCause.DETECT: "From a failure (of a silent node: from its last sign of life) to the controller's decision.",
    TimeCause.RECOVER: "From the decision until all ranks have done a step again, without the loading.",
    TimeCause.START: "From a job's launch, or a planned change of its nodes, until all ranks have done a step, without "
    "the loading.",
    TimeCause.IDLE: "Nodes are held without work: after the last step of a job; of single nodes also as spares, or "
    "lost and not yet returned.",
    TimeCause.QUEUE: "No job of the run is running: the one before has ended, and the next one has not begun.",
    TimeCause.UNKNOWN: "The ledger does not say.",
}
GOODPUT_TEXT = (
    "Goodput is the time in which training moved forward (train and save), divided by the time in which jobs of the "
    "run were running. It is the number of resilio status and resilio runs."
)
ETTR_TEXT = (
    "ETTR, the effective training time ratio, is train alone divided by the whole wall clock, from the first launch "
    "to the end: time in the queue and unknown time count against it."
)
# Where jobs overlap, a second belongs to the one that got further with it.
_RANK = {cause: number for number, cause in enumerate((
    TimeCause.TRAIN, TimeCause.SAVE, TimeCause.REPEATED, TimeCause.LOAD, TimeCause.STALLED, TimeCause.DETECT,
    TimeCause.RECOVER, TimeCause.START, TimeCause.IDLE, TimeCause.UNKNOWN, TimeCause.QUEUE,
))}  # fmt: skip


class PartPhase(str, Enum):
    """Where in its job a span lies: before, in, between and after the times in which ranks make steps."""

    STARTUP = "startup"
    TRAINING = "training"
    BETWEEN = "between"
    CLOSING = "closing"
    NO_JOB = "no_job"


@dataclass(frozen=True)
class TimeSpan:
    """A span of time with one cause. ``lines``: the ledger's, which begin, end, or measure it; ``why``: in words.

    ``part``: the job's part of the run, "" between jobs; ``round``: None outside of rounds.
    """

    begin_us: int
    end_us: int
    cause: TimeCause
    why: str
    lines: tuple[Event, ...]
    part: str = ""
    round: int | None = None
    phase: PartPhase = PartPhase.NO_JOB

    @property
    def us(self) -> int:
        """Return its length in microseconds."""
        return self.end_us - self.begin_us


_FAR_S = 1e12  # some 30,000 years


def microseconds(seconds: float) -> int:
    """Return seconds as whole microseconds; of what is no time of ours, the farthest one."""
    return round(min(max(seconds, -_FAR_S), _FAR_S) * US)


def covered(spans: Iterable[TimeSpan], over: Iterable[TimeSpan]) -> list[TimeSpan]:
    """Return ``spans`` with what ``over`` covers replaced by it, as far as there are spans below.

    Both by time; those of ``over`` do not overlap each other. What is put in keeps part, round and phase of what it
    covers.
    """
    found: list[TimeSpan] = []
    waiting = [one for one in over if one.us > 0]
    index = 0
    for span in spans:
        at = span.begin_us
        while index < len(waiting) and waiting[index].end_us <= at:
            index += 1
        look = index
        while look < len(waiting) and waiting[look].begin_us < span.end_us:
            upper = waiting[look]
            begin, end = max(upper.begin_us, at), min(upper.end_us, span.end_us)
            if begin > at:
                found.append(replace(span, begin_us=at, end_us=begin))
            if end > begin:
                found.append(replace(
                    span, begin_us=begin, end_us=end, cause=upper.cause, why=upper.why, lines=upper.lines,
                ))  # fmt: skip
                at = end
            look += 1
        if span.end_us > at:
            found.append(replace(span, begin_us=at))
    return found


def merged(one: list[TimeSpan], other: list[TimeSpan]) -> list[TimeSpan]:
    """Return one span for each moment of two lists of spans: where both have one, the one that got further."""
    edges = sorted({edge for span in (*one, *other) for edge in (span.begin_us, span.end_us)})
    left, right = _pieces(one, edges), _pieces(other, edges)
    found: list[TimeSpan] = []
    for begin in edges[:-1]:
        here = [piece for piece in (left.get(begin), right.get(begin)) if piece is not None]
        if here:
            _add(found, min(here, key=lambda span: _RANK[span.cause]))
    return found


def _pieces(spans: list[TimeSpan], edges: list[int]) -> dict[int, TimeSpan]:
    found: dict[int, TimeSpan] = {}
    number = 0
    for span in spans:
        while edges[number] < span.begin_us:
            number += 1
        while edges[number] < span.end_us:
            found[edges[number]] = replace(span, begin_us=edges[number], end_us=edges[number + 1])
            number += 1
    return found


def _add(found: list[TimeSpan], span: TimeSpan) -> None:
    last = found[-1] if found else None
    if (
        last is not None
        and last.end_us == span.begin_us
        and last == replace(span, begin_us=last.begin_us, end_us=last.end_us)
    ):
        found[-1] = replace(last, end_us=span.end_us)
    else:
        found.append(span)


def totals(spans: Iterable[TimeSpan]) -> dict[TimeCause, int]:
    """Return the microseconds of each cause, all causes named."""
    found = dict.fromkeys(TimeCause, 0)
    for span in spans:
        found[span.cause] += span.us
    return found


def gaps(spans: Iterable[TimeSpan]) -> Iterator[tuple[int, int]]:
    """Return the times between spans in which there is none."""
    last: int | None = None
    for span in spans:
        if last is not None and span.begin_us > last:
            yield last, span.begin_us
        last = span.end_us


def apart(spans: list[TimeSpan]) -> list[TimeSpan]:
    """Return the spans by time, without overlaps."""
    found: list[TimeSpan] = []
    for span in sorted(spans, key=lambda one: one.begin_us):
        if found and span.begin_us <= found[-1].end_us:
            last = found[-1]
            found[-1] = TimeSpan(
                last.begin_us, max(last.end_us, span.end_us), span.cause, last.why, (*last.lines, *span.lines)
            )
        else:
            found.append(span)
    return found
