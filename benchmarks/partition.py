"""How long cutting a model into stages takes on one core, and that it finds what the plain dynamic programme finds.

    python benchmarks/partition.py [--operators 10000] [--stages 64]

CPU seconds of this process. The plain programme is definition 1 of the paper word for word, in Python: for the volume
O(stages · operators²), and for the range once more for each possible smallest stage. It is run where it ends in time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from resilio_hpc.autoparallel.search.partition import NoPartition, partition

NO_LIMIT = 2**63


def plain_partition(flops: Sequence[int], volumes: Sequence[int], stages: int, band: float) -> tuple[int, int] | None:
    """(largest volume, range of FLOPs) of the best partition; None where none keeps to the band."""
    prefix = [0]
    for one in flops:
        prefix.append(prefix[-1] + one)
    mean, delta = Fraction(prefix[-1], stages), Fraction(repr(band))
    low, high = (1 - delta) * mean, (1 + delta) * mean
    largest = _plain_volume(prefix, volumes, stages, low, high)
    if largest is None:
        return None
    open_at = [0, *(i for i in range(1, len(flops)) if volumes[i] <= largest), len(flops)]
    points = [prefix[i] for i in open_at]
    smallest = {b - a for j, b in enumerate(points) for a in points[:j] if low <= b - a <= high}
    ranges = [(most - least) for least in smallest if (most := _plain_most(points, stages, least, high)) is not None]
    return largest, min(ranges)


def _plain_volume(
    prefix: Sequence[int], volumes: Sequence[int], stages: int, low: Fraction, high: Fraction
) -> int | None:
    """Least largest volume: best[r] over stages that end at r."""
    count = len(prefix)
    best = [0] + [NO_LIMIT] * (count - 1)
    for _ in range(stages):
        after = [NO_LIMIT] * count
        for end in range(1, count):
            for begin in range(end):
                if best[begin] < NO_LIMIT and low <= prefix[end] - prefix[begin] <= high:
                    after[end] = min(after[end], max(best[begin], volumes[begin] if begin else 0))
        best = after
    return best[-1] if best[-1] < NO_LIMIT else None


def _plain_most(points: Sequence[int], stages: int, least: int, high: Fraction) -> int | None:
    """Return the least largest stage among partitions whose stages have ``least`` or more."""
    best = [0] + [NO_LIMIT] * (len(points) - 1)
    for _ in range(stages):
        after = [NO_LIMIT] * len(points)
        for end in range(1, len(points)):
            for begin in range(end):
                size = points[end] - points[begin]
                if best[begin] < NO_LIMIT and least <= size <= high:
                    after[end] = min(after[end], max(best[begin], size))
        best = after
    return best[-1] if best[-1] < NO_LIMIT else None


def graphs(count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """FLOPs and volumes of different kinds; the seed is fixed."""
    generator = np.random.default_rng(0)
    even, varied = generator.integers(1, 10**9, count), np.exp(generator.normal(20, 1, count)).astype(np.int64)
    same, few = np.ones(count, dtype=np.int64), generator.choice([1, 2, 3, 10], count)
    return {
        "all volumes equal": (even, same),
        "few volumes": (even, few),
        "all volumes differ": (even, generator.integers(1, 10**6, count)),
        "FLOPs log-normal": (varied, few),
        "4 of 5 without FLOPs": (even * (generator.random(count) < 0.2), few),
        "blocks of 12": (np.tile(even[:12], -(-count // 12))[:count], np.tile(few[:12], -(-count // 12))[:count]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--band", type=float, default=0.5)
    options = parser.parse_args()
    print(f"{options.operators} operators into {options.stages} stages, band {options.band}: CPU seconds")
    for name, (flops, volumes) in graphs(options.operators).items():
        began = time.process_time()
        try:
            found = partition(flops, volumes, options.stages, options.band)
            said = f"range {found.flops_range * options.stages / flops.sum():.4f} of the mean"
        except NoPartition as error:
            said = str(error)
        print(f"  {name:<22} {time.process_time() - began:7.3f}  {said}")
    print("60 operators into 6 stages, beside the plain dynamic programme: CPU seconds")
    for name, (flops, volumes) in graphs(60).items():
        work, sizes = (flops // 10**7).tolist(), volumes.tolist()
        began = time.process_time()
        found = partition(work, sizes, 6, options.band)
        ours, began = time.process_time() - began, time.process_time()
        plain = plain_partition(work, sizes, 6, options.band)
        same = plain == (found.largest_input_bytes, found.flops_range)
        print(f"  {name:<22} {ours:7.3f} {time.process_time() - began:7.3f}  {'equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
