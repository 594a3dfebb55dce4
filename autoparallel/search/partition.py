"""A model cut into pipeline stages: the paper's definition 1 (RES-19), exactly.

Over a fixed order of operators, each stage is a run of at least one. Minimise the largest stage input volume, subject
to (1 - band)·v <= f_s <= (1 + band)·v with v = total FLOPs / stages; among those, the least range of FLOPs (largest
minus smallest stage). The range does not decompose over stages, so there are two passes:

1. The volume of a cut does not depend on the other cuts, so the least achievable maximum is found by bisection over the
   volumes that occur; each probe is the dynamic programme "which operators can begin stage k".
2. Of the cuts whose volume is at most that: ``narrowest``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resilio_hpc.autoparallel.model.graph import MOST_FLOPS, OperatorGraph
from resilio_hpc.core.errors import UsageError

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """Points between operators, including the beginning and the end of the model.

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
        """Return the points whose volume is at most this."""
        return self._keep(self.volume <= volume)

    def distinct(self) -> Cuts:
        """Return one of each run of points without FLOPs between them: the first with the least volume.

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
    """Return indices of the points of a partition with the least range of FLOPs among those within floor … ceiling.

    There must be one. Some partition bounds the range from above (``best``). An interval of smallest stages is dropped
    when no partition has all its stages within [low, high + best - 1]: each whose smallest lies in it has a range of
    ``best`` or more. What is found otherwise may lower ``best``; then the interval is halved. Exact: all are integers.
    """
    points = _evenest(cuts, stages, floor, ceiling)
    best = _range(cuts, points)
    pending = [(floor, min(cuts.total // stages, ceiling))]  # the smallest stage has at most the mean
    while pending and best:
        low, high = pending.pop()
        low = max(low, -(-cuts.total // stages) - best + 1)  # the largest has at least the mean
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
    """Return a partition with stages closest around the mean, or nearly: a good start for ``narrowest``."""
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


STAGES_TRIED = 16  # on either side of the request, to name the nearest possible number of stages


class NoPartition(UsageError):
    """No partition fits the band. ``nearest_band``: the smallest that some partition fits."""

    def __init__(self, message: str, nearest_band: float, nearest_stages: int | None) -> None:
        super().__init__(message)
        self.nearest_band = nearest_band
        self.nearest_stages = nearest_stages


@dataclass(frozen=True)
class StagePartition:
    """``starts``: first operator of each stage. ``flops`` and ``input_bytes``: of each stage."""

    starts: tuple[int, ...]
    flops: tuple[int, ...]
    input_bytes: tuple[int, ...]
    band: float

    @property
    def largest_input_bytes(self) -> int:
        return max(self.input_bytes)

    @property
    def flops_range(self) -> int:
        """Return the FLOPs of the largest stage minus those of the smallest."""
        return max(self.flops) - min(self.flops)


def partition_graph(graph: OperatorGraph, stages: int, band: float, blocks: bool = False) -> StagePartition:
    """Do as ``partition`` for a graph; with ``blocks`` the blocks of the model stay whole.

    Raises as ``partition`` does.
    """
    allowed = graph.block_starts if blocks else None
    try:
        return partition(graph.flops, graph.cut_bytes, stages, band, allowed)
    except NoPartition as error:
        largest = int(graph.flops.argmax())
        mean = graph.total_flops / stages
        if graph.flops[largest] <= (1 + band) * mean:
            raise
        what = (
            f"{graph.operators[largest].name!r} alone has {graph.flops[largest] / mean:.2f} times the mean of a stage"
        )
        raise NoPartition(f"{what}: {error}", error.nearest_band, error.nearest_stages) from None


def partition(
    flops: ArrayLike, cut_bytes: ArrayLike, stages: int, band: float, allowed: ArrayLike | None = None
) -> StagePartition:
    """Return the best partition into ``stages``.

    ``flops`` (n,): of each operator, integers >= 0. ``cut_bytes`` (n,): what a stage that begins with it receives; the
    first is not looked at. ``band``: δ. ``allowed`` (n,): which operators may begin a stage; default: all.
    Raises UsageError for numbers that make no sense, NoPartition where no partition keeps to the band.
    """
    cuts = _cuts(flops, cut_bytes, allowed)
    _check_stages(stages, cuts, band)
    floor, ceiling = band_limits(cuts.total, stages, band)
    kept = cuts.distinct() if floor > 0 else cuts
    if kept.path(stages, floor, ceiling) is None:
        raise _infeasible(cuts, stages, band)
    within = kept.up_to(_least_volume(kept, stages, floor, ceiling))
    starts = within.position[narrowest(within, stages, floor, ceiling)[:-1]]
    ends = [*starts[1:].tolist(), len(cuts.prefix) - 1]
    sums = tuple(int(cuts.prefix[end] - cuts.prefix[start]) for start, end in zip(starts, ends, strict=True))
    volumes = np.asarray(cut_bytes, dtype=np.int64)[starts]
    return StagePartition(tuple(starts.tolist()), sums, (0, *volumes[1:].tolist()), band)


def band_limits(total: int, stages: int, band: float) -> tuple[int, int]:
    """Return the least and the most FLOPs of a stage, exactly: a band of 0.1 is one tenth."""
    share, delta = Fraction(total, stages), Fraction(repr(band))
    low, high = (1 - delta) * share, (1 + delta) * share
    return max(0, -(-low.numerator // low.denominator)), min(total, high.numerator // high.denominator)


def _cuts(flops: ArrayLike, cut_bytes: ArrayLike, allowed: ArrayLike | None) -> Cuts:
    work, volume = np.asarray(flops), np.asarray(cut_bytes)
    if work.ndim != 1 or work.shape != volume.shape or not len(work):
        raise UsageError(f"FLOPs and volumes of n operators each, n >= 1, not of {work.shape} and {volume.shape}")
    if work.dtype.kind not in "iu" or volume.dtype.kind not in "iu" or work.min() < 0 or volume.min() < 0:
        raise UsageError("FLOPs and volumes must be integers and not negative")
    if sum(work.tolist()) > MOST_FLOPS:
        raise UsageError("too many FLOPs to be summed exactly: describe one micro-batch, not a whole step")
    prefix = np.concatenate([[0], np.cumsum(work, dtype=np.int64)])
    inner = np.ones(len(work), dtype=np.bool_) if allowed is None else np.asarray(allowed, dtype=np.bool_).copy()
    inner[0] = True
    position = np.append(np.flatnonzero(inner), len(work))
    bounds = np.concatenate([[0], volume[position[1:-1]].astype(np.int64), [0]])
    return Cuts(position, prefix[position], bounds, prefix)


def _check_stages(stages: int, cuts: Cuts, band: float) -> None:
    if stages < 1:
        raise UsageError(f"{stages} pipeline stages: there must be at least 1")
    most = len(cuts.position) - 1
    if stages > most:
        raise UsageError(f"{stages} pipeline stages: the model can be cut into {most} at most")
    if not 0 <= band < float("inf"):
        raise UsageError(f"a band of {band}: it is a part of the mean, 0 or more")
    if not cuts.total:
        raise UsageError("no operator has FLOPs: there is nothing to balance")


def _least_volume(cuts: Cuts, stages: int, floor: int, ceiling: int) -> int:
    """Return the smallest largest volume with a partition; there is one when all cuts are allowed."""
    volumes = np.unique(cuts.volume)
    low, high = 0, len(volumes) - 1
    while low < high:
        middle = (low + high) // 2
        if cuts.up_to(int(volumes[middle])).path(stages, floor, ceiling) is None:
            low = middle + 1
        else:
            high = middle
    return int(volumes[low])


def _infeasible(cuts: Cuts, stages: int, band: float) -> NoPartition:
    nearest_band = _least_band(cuts, stages)
    near = (s for d in range(1, STAGES_TRIED + 1) for s in (stages - d, stages + d) if 0 < s < len(cuts.position))
    nearest_stages = next((s for s in near if _keeps(cuts, s, band)), None)
    instead = f"--band {nearest_band:g}" + (f", or {nearest_stages} stages" if nearest_stages else "")
    why = f"no partition into {stages} stages has each stage's FLOPs within {band:.3g} of the mean"
    return NoPartition(f"{why}: nearest is {instead}", nearest_band, nearest_stages)


def _keeps(cuts: Cuts, stages: int, band: float) -> bool:
    return cuts.path(stages, *band_limits(cuts.total, stages, band)) is not None


def _least_band(cuts: Cuts, stages: int) -> float:
    """Return the smallest band, in thousandths, that some partition fits."""
    low, high = 0, 1000 * stages
    while low < high:
        middle = (low + high) // 2
        if _keeps(cuts, stages, middle / 1000):
            high = middle
        else:
            low = middle + 1
    return low / 1000
