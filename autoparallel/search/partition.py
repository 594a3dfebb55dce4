"""A model cut into pipeline stages: the paper's definition 1 (RES-19), exactly.

Over a fixed order of operators, each stage is a run of at least one. Minimise the largest stage input volume, subject
to (1 - band)·v <= f_s <= (1 + band)·v with v = total FLOPs / stages; among those, the least range of FLOPs (largest
minus smallest stage). The range does not decompose over stages, so there are two passes:

1. The volume of a cut does not depend on the other cuts, so the least achievable maximum is found by bisection over the
   volumes that occur; each probe is the dynamic programme "which operators can begin stage k" (``stage_cuts``).
2. Of the cuts whose volume is at most that: ``stage_cuts.narrowest``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from resilio_hpc.autoparallel.model.graph import MOST_FLOPS, OperatorGraph
from resilio_hpc.autoparallel.search.stage_cuts import Cuts, narrowest
from resilio_hpc.core.errors import UsageError

STAGES_TRIED = 16  # on either side of what was asked for, to name the nearest number of stages that can be had


class NoPartition(UsageError):
    """No partition keeps to the band. ``nearest_band``: the least that some partition keeps to."""

    def __init__(self, message: str, nearest_band: float, nearest_stages: int | None) -> None:
        super().__init__(message)
        self.nearest_band = nearest_band
        self.nearest_stages = nearest_stages


@dataclass(frozen=True)
class Partition:
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
        """FLOPs of the largest stage minus those of the smallest."""
        return max(self.flops) - min(self.flops)


def partition_graph(graph: OperatorGraph, stages: int, band: float, blocks: bool = False) -> Partition:
    """``partition`` of a graph; with ``blocks`` the blocks of the model stay whole. Raises as ``partition`` does."""
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
) -> Partition:
    """The best partition into ``stages``.

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
    return Partition(tuple(starts.tolist()), sums, (0, *volumes[1:].tolist()), band)


def band_limits(total: int, stages: int, band: float) -> tuple[int, int]:
    """The least and the most FLOPs of a stage, exactly: a band of 0.1 is one tenth."""
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
    """The least largest volume with which there is a partition; there is one when all cuts are allowed."""
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
    """The least band, in thousandths, that some partition keeps to."""
    low, high = 0, 1000 * stages
    while low < high:
        middle = (low + high) // 2
        if _keeps(cuts, stages, middle / 1000):
            high = middle
        else:
            low = middle + 1
    return low / 1000
