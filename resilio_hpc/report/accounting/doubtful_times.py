"""Ledger lines whose times do not fit those around them in their file: the writer's clock was set. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import TimeCause, TimeSpan, apart, microseconds

SET_S = 60.0  # less is no more than lines that were held up
# their time is that of an end, which the writer may have learned of long after
_OF_ENDS = frozenset({"rank_failed", "first_failure", "stopped_rank_failed"})


def believed(events: Sequence[Event]) -> tuple[list[Event], list[TimeSpan]]:
    """Return the events whose times can be believed, and the times around the others as spans of unknown cause.

    Most lines of a file are believed: those of its longest series without a step back, and what fits between these.
    ``events`` by time, and those of a ledger file with their line numbers; others are all believed.
    """
    files: dict[str, list[Event]] = {}
    for event in events:
        if event.line:
            files.setdefault(event.file, []).append(event)
    doubtful: set[int] = set()
    spans: list[TimeSpan] = []
    for written in files.values():
        written.sort(key=lambda event: event.line)
        if _steps_back(written):
            _doubt(written, doubtful, spans)
    if not doubtful:
        return list(events), []
    return [event for event in events if id(event) not in doubtful], apart(spans)


def _steps_back(written: Sequence[Event]) -> bool:
    newest = 0.0
    for event in written:
        if event.kind in _OF_ENDS:
            continue
        if event.time < newest - SET_S:
            return True
        newest = max(newest, event.time)
    return False


def _doubt(written: Sequence[Event], doubtful: set[int], spans: list[TimeSpan]) -> None:
    """Add the lines that do not fit, and the times from the line before each series of them to the one after."""
    series = _longest_series([event for event in written if event.kind not in _OF_ENDS])
    number = 0  # of the line of the series that comes next
    wrong: list[Event] = []
    for event in written:
        before = series[number - 1] if number else None
        after = series[number] if number < len(series) else None
        if event is after:
            if before is not None and wrong:
                spans.append(_around(before, wrong, event))
            number, wrong = number + 1, []
        elif not _fits(event, before, after):
            doubtful.add(id(event))
            wrong.append(event)


def _fits(event: Event, before: Event | None, after: Event | None) -> bool:
    late = after is not None and event.time > after.time + SET_S
    early = before is not None and event.time < before.time - SET_S and event.kind not in _OF_ENDS
    return not late and not early


def _around(before: Event, wrong: Sequence[Event], after: Event) -> TimeSpan:
    return TimeSpan(
        microseconds(before.time), microseconds(after.time), TimeCause.UNKNOWN,
        "the clock of this file's writer was set", (before, wrong[0], after),
    )  # fmt: skip


def _longest_series(events: Sequence[Event]) -> list[Event]:
    """Return the longest part of ``events`` whose times never step back."""
    ends: list[float] = []  # the least time that ends a series of each length
    last: list[int] = []  # its event
    previous: list[int] = []
    for number, event in enumerate(events):
        length = bisect_right(ends, event.time)
        previous.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(event.time)
            last.append(number)
        else:
            ends[length], last[length] = event.time, number
    found: list[Event] = []
    number = last[-1] if last else -1
    while number >= 0:
        found.append(events[number])
        number = previous[number]
    return found[::-1]
