"""What ranks say that only the ledger keeps: room of their snapshots, planned steps, logged values, their pace. Pure.

Values come once a second, steps as they are done. The ledger gets a line of each every two seconds at first and every
minute later, so that a month of them stays small. Of several ranks of a node, values of the lowest count; the pace is
that of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from resilio_hpc.core import rank_link
from resilio_hpc.core.json_fields import printable

LEAST_S, MOST_S = 2.0, 60.0
SHARE = 0.01  # of the round's time: the interval between two lines
MOST_VALUES = 8
LONGEST_NAME = 32
MOST_STEPS = 10_000  # timed for one line: beyond these, steps of a minute are alike


class RankRecords:
    """The lines of one node."""

    def __init__(self) -> None:
        self._round = -1
        self._rank = -1
        self._step = -1  # of the last line
        self._began = self._last = 0.0
        self._sums: dict[str, float] = {}
        self._seconds = 0.0
        self._pace = PaceRecord(-1, 0, 0.0)

    def of(self, number: int, rank: int, message: rank_link.RankMessage) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (event, fields) for a message of a rank of round ``number``."""
        if isinstance(message, rank_link.SnapshotPlaced):
            yield "snapshot_room", {"rank": rank, "step": message.step, "room": message.room, "why": message.why}
        elif isinstance(message, rank_link.StepsPlanned):
            yield "steps_planned", {"round": number, "start": message.start, "total": message.total}
        elif isinstance(message, rank_link.ValuesLogged):
            yield from self._logged(number, rank, message)
        elif isinstance(message, rank_link.StepDone) and rank == 0:
            yield from self._step_done(number, message)

    def _step_done(self, number: int, message: rank_link.StepDone) -> Iterator[tuple[str, dict[str, Any]]]:
        pace = self._pace
        if number != pace.round or message.step <= pace.step or message.time < pace.time:
            self._pace = PaceRecord(number, message.step, message.time)
            return
        fields = pace.line(message.step, message.time)
        if fields is not None:
            yield "pace", {**fields}

    def _logged(self, number: int, rank: int, message: rank_link.ValuesLogged) -> Iterator[tuple[str, dict[str, Any]]]:
        if number != self._round or rank < self._rank or message.time < self._last:  # the clock was set back
            self._round, self._rank, self._began, self._last, self._step = number, rank, message.time, -math.inf, -1
            self._sums, self._seconds = {}, 0.0
        if rank != self._rank:
            return
        for name, value in _named(message.sums).items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._seconds += max(0.0, message.seconds)
        interval = _interval(message.time - self._began)
        if (message.time - self._last < interval and not message.last) or (message.last and message.step == self._step):
            return
        yield "logged", {
            "round": number, "rank": rank, "step": message.step, "values": _named(message.values),
            "not_finite": [printable(name, LONGEST_NAME) for name in message.not_finite[:MOST_VALUES]],
            "sums": self._sums, "seconds": round(self._seconds, 3),
        }  # fmt: skip
        self._step, self._last, self._sums, self._seconds = message.step, message.time, {}, 0.0


class PaceRecord:
    """How long the steps of one round take, by the clock of one rank. Its first step is not timed."""

    def __init__(self, number: int, step: int, time: float) -> None:
        self.round, self.step, self.time = number, step, time
        self._began = self._line_at = time
        self._line_step = step
        self._took: list[float] = []

    def line(self, step: int, time: float) -> dict[str, Any] | None:
        """Take a later step; return the fields of a line where one is due: the median of the steps since the last."""
        if len(self._took) < MOST_STEPS:
            self._took.append((time - self.time) / (step - self.step))
        self.step, self.time = step, time
        if time - self._line_at < _interval(time - self._began):
            return None
        fields = {
            "round": self.round, "step": step, "steps": step - self._line_step,
            "step_s": round(median(self._took), 6), "slowest_s": round(max(self._took), 6),
        }  # fmt: skip
        self._line_at, self._line_step, self._took = time, step, []
        return fields


def _interval(since_begin_s: float) -> float:
    """Return the seconds between two lines, so long after the first."""
    return min(MOST_S, max(LEAST_S, since_begin_s * SHARE))


def _named(values: dict[str, float]) -> dict[str, float]:
    found = [(printable(name, LONGEST_NAME), value) for name, value in values.items() if math.isfinite(value)]
    return dict(found[:MOST_VALUES])
