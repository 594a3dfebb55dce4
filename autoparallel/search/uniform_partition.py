"""The partition of a uniform transformer into whole blocks, without a graph: for searches that ask it often."""

from __future__ import annotations

import numpy as np

from resilio_hpc.autoparallel.search.partition import band_limits, partition


def uniform_partition(
    layers: int, block_flops: int, first_flops: int, last_flops: int, stages: int, band: float
) -> tuple[int, ...]:
    """Blocks in each stage, of the partition that ``partition`` finds for embedding, equal blocks and head.

    Every cut has the same volume, so the range of FLOPs decides. All numbers of blocks in the first and in the last
    stage are compared at once; those between are shared out evenly, which no other way betters.
    Raises what ``partition`` raises.
    """
    if 2 < stages <= layers + 2 and block_flops > 0:
        total = first_flops + layers * block_flops + last_flops
        ends = _best_ends(layers, block_flops, first_flops, last_flops, stages - 2, band_limits(total, stages, band))
        if ends is not None:
            first, last = ends
            each, more = divmod(layers - first - last, stages - 2)
            return (first, *(each + (index < more) for index in range(stages - 2)), last)
    return _by_partition(layers, block_flops, first_flops, last_flops, stages, band)


def _best_ends(
    layers: int, block: int, first_flops: int, last_flops: int, inner: int, limits: tuple[int, int]
) -> tuple[int, int] | None:
    floor, ceiling = limits
    first = np.arange(min(layers, max(0, ceiling - first_flops) // block) + 1)[:, None]
    last = np.arange(min(layers, max(0, ceiling - last_flops) // block) + 1)[None, :]
    between = layers - first - last
    fewest = between // inner
    most = fewest + (between % inner > 0)
    begin, end = first_flops + first * block, last_flops + last * block
    least = np.minimum(np.minimum(begin, end), fewest * block)
    largest = np.maximum(np.maximum(begin, end), most * block)
    fits = (between >= inner) & (least >= floor) & (largest <= ceiling)
    if not fits.any():
        return None
    spread = np.where(fits, largest - least, np.iinfo(np.int64).max)
    row, column = np.unravel_index(int(spread.argmin()), spread.shape)
    return int(row), int(column)


def _by_partition(layers: int, block: int, first: int, last: int, stages: int, band: float) -> tuple[int, ...]:
    flops = np.array([first, *[block] * layers, last], dtype=np.int64)
    starts = partition(flops, np.ones(layers + 2, dtype=np.int64), stages, band).starts
    ends = [*starts[1:], layers + 2]
    return tuple(min(end, layers + 1) - max(start, 1) for start, end in zip(starts, ends, strict=True))
