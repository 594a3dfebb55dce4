"""Where stages may begin, and what a partition asks of it: is there one, and which is the most even?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """Points between operators, the beginning and the end of the model among them.

    ``position`` (m,): the operator after the point. ``before`` (m,): FLOPs of all operators before it, not decreasing.
    ``volume`` (m,): bytes that cross it, 0 at both ends. ``prefix`` (n + 1,): FLOPs before each of all operators.
    """

    position: Integers
    before: Integers
    volume: Integers
    prefix: Integers

    @property
    def total(self) -> int:
        return int(self.before[-1])

    def up_to(self, volume: int) -> Cuts:
        """Those whose volume is at most this."""
        return self._keep(self.volume <= volume)

    def distinct(self) -> Cuts:
        """One of each run of points between which there are no FLOPs: that with the least volume, of these the first.

        No partition into stages that all have FLOPs needs more: it has one cut at most in a run.
        """
        order = np.lexsort((self.position, self.volume, self.before))
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = np.diff(self.before[order]) > 0
        keep = np.zeros(len(order), dtype=np.bool_)
        keep[order[first]] = True
        keep[(self.before == 0) | (self.before == self.total)] = False
        keep[[0, -1]] = True
        return self._keep(keep)

    def _keep(self, keep: NDArray[np.bool_]) -> Cuts:
        return Cuts(self.position[keep], self.before[keep], self.volume[keep], self.prefix)

    def path(self, stages: int, floor: int, ceiling: int) -> Integers | None:
        """Points of a partition, as indices (stages + 1,), whose stages have floor … ceiling FLOPs; None: no such.

        Level k holds the points that k stages can end at, so it is the dynamic programme over (stage, point), of which
        only what can still reach the end in time is looked at.
        """
        before, last = self.before, len(self.before) - 1
        levels = [np.zeros(1, dtype=np.int64)]
        for done in range(1, stages):
            left, ends = stages - done, levels[-1]
            least = max(int(before[ends[0]]) + floor, self.total - left * ceiling)
            most = min(int(before[ends[-1]]) + ceiling, self.total - left * floor)
            first = max(int(np.searchsorted(before, least, "left")), int(ends[0]) + 1)
            points = np.arange(first, min(int(np.searchsorted(before, most, "right")), last))
            reached = points[_begins(before, ends, points, floor, ceiling)[0]]
            if not len(reached):
                return None
            levels.append(reached)
        return self._backwards(levels, last, floor, ceiling)

    def _backwards(self, levels: list[Integers], last: int, floor: int, ceiling: int) -> Integers | None:
        points = [last]
        for ends in reversed(levels):
            found, index = _begins(self.before, ends, np.array(points[-1:]), floor, ceiling)
            if not found[0]:
                return None
            points.append(int(ends[index[0]]))
        return np.array(points[::-1])


def _begins(
    before: Integers, ends: Integers, points: Integers, floor: int, ceiling: int
) -> tuple[NDArray[np.bool_], Integers]:
    """Whether a stage of floor … ceiling FLOPs leads from one of ``ends`` to each point, and the first such end."""
    at = before[ends]
    first = np.searchsorted(at, before[points] - ceiling, "left")
    beyond = np.searchsorted(at, before[points] - floor, "right")
    if floor <= 0:  # an empty stage has 0 FLOPs, too
        beyond = np.minimum(beyond, np.searchsorted(ends, points, "left"))
    return first < beyond, first


def narrowest(cuts: Cuts, stages: int, floor: int, ceiling: int) -> Integers:
    """Indices of the points of a partition with the least range of FLOPs among those within floor … ceiling.

    There must be one. Some partition bounds the range from above (``best``). An interval of smallest stages is dropped
    when no partition has all its stages within [low, high + best - 1]: each whose smallest lies in it has a range of
    ``best`` or more. What is found otherwise may lower ``best``; then the interval is halved. Exact: all are integers.
    """
    points = _evenest(cuts, stages, floor, ceiling)
    best = _range(cuts, points)
    pending = [(floor, min(cuts.total // stages, ceiling))]  # the smallest stage has the mean at most
    while pending and best:
        low, high = pending.pop()
        low = max(low, -(-cuts.total // stages) - best + 1)  # the largest has the mean at least
        if low > high:
            continue
        found = cuts.path(stages, low, min(high + best - 1, ceiling))
        if found is None:
            continue
        if _range(cuts, found) < best:
            points, best = found, _range(cuts, found)
            pending.append((low, high))
        elif low < high:
            middle = (low + high) // 2
            pending += [(low, middle), (middle + 1, high)]
    return points


def _evenest(cuts: Cuts, stages: int, floor: int, ceiling: int) -> Integers:
    """A partition whose stages lie closest around the mean, or nearly: a good start for ``narrowest``."""
    mean = cuts.total // stages
    low, high = 0, max(ceiling - mean, mean - floor)
    found = cuts.path(stages, floor, ceiling)
    assert found is not None
    while low < high:
        middle = (low + high) // 2
        points = cuts.path(stages, max(floor, mean - middle), min(ceiling, mean + middle))
        if points is None:
            low = middle + 1
        else:
            found, high = points, middle
    return found


def _range(cuts: Cuts, points: Integers) -> int:
    sums = np.diff(cuts.before[points])
    return int(sums.max() - sums.min())
