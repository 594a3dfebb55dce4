"""Ledger lines whose times later lines of the same file contradict: the writer's clock was set back. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import TimeCause, TimeSpan, apart, microseconds

SET_BACK_S = 60.0  # less is no more than lines that were held up
# their time is that of an end, which the writer may have learned of long after
_OF_ENDS = frozenset({"rank_failed", "first_failure", "stopped_rank_failed"})


def believed(events: Sequence[Event]) -> tuple[list[Event], list[TimeSpan]]:
    """Return the events whose times can be believed, and the times of the others as spans of unknown cause.

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
        wrong = _contradicted(written)
        if wrong:
            doubtful.update(map(id, wrong))
            times = [event.time for event in wrong]
            spans.append(TimeSpan(
                microseconds(min(times)), microseconds(max(times)), TimeCause.UNKNOWN,
                "the clock of this file's writer was set back", (wrong[0], wrong[-1]),
            ))  # fmt: skip
    return [event for event in events if id(event) not in doubtful], apart(spans)


def _contradicted(written: Sequence[Event]) -> list[Event]:
    found: list[Event] = []
    earliest = float("inf")
    for event in reversed(written):
        if event.time > earliest + SET_BACK_S:
            found.append(event)
        elif event.kind not in _OF_ENDS:
            earliest = min(earliest, event.time)
    return found[::-1]
