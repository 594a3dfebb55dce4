#!/usr/bin/env python3
"""Slow ranks in drawn series: how many are found and named, how soon, and how often a rank is blamed that is not slow.

    python benchmarks/slowness.py --json slowness.json
    python benchmarks/slowness.py --ranks 8 64 --runs 50 --windows 2000

Each run has noise of every step, steps with a heavy tail, collections of garbage, evaluations in which only rank 0
works, swings of all ranks' load, and stages with unequal work. One rank becomes slower by 1.3 to 3 times (from 1.5
where uneven). "uneven": batches differ in each step as sequences of different lengths do. A rank counts as found
where it is reported within the limit; other reported ranks lower the precision. The time of a window is printed, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from resilio_hpc.watch.slow_ranks import Slowdown, SlowWatch, WorkDone

STEPS = 8  # of a window
AT = 20  # the window from which on a rank is slow
WITHIN = 8  # windows
WITHIN_UNEVEN = 48


def told(ranks: int, windows: int, seed: int, uneven: bool, slow: int = -1, factor: float = 1.0) -> list[Any]:
    """Return (window, change) of each reported change, and the seconds that the watch took, in the last place."""
    draw, watch, found, took_s = np.random.default_rng(seed), SlowWatch(), [], 0.0
    usual = 1.0 + 0.5 * (np.arange(ranks) * 4 // ranks)
    usual[0] *= 1.1
    swing = 0.0
    for number in range(windows):
        own, wait = np.zeros(ranks), np.zeros(ranks)
        if draw.random() < 0.02:
            swing = draw.uniform(-0.1, 0.1)
        for _ in range(STEPS):
            work = usual * np.exp(draw.normal(0, 0.05, ranks) + swing)
            if uneven:
                work *= draw.lognormal(0, 0.15, ranks)
            late = draw.random(ranks) < 0.002
            work[late] *= 1 + draw.pareto(2, late.sum())
            if draw.random() < 0.02:
                work[draw.integers(ranks)] += draw.uniform(0.5, 3)
            if number >= AT and slow >= 0:
                work[slow] *= factor
            step = work.max() + 0.2 * np.exp(draw.normal(0, 0.1))
            own += work
            wait += step - work
        if draw.random() < 0.05:
            own[0] += 5
            wait[1:] += 5
        pairs = zip(own.tolist(), wait.tolist(), strict=True)
        done = {rank: WorkDone(a, b, 3 * STEPS, STEPS) for rank, (a, b) in enumerate(pairs)}
        began = time.perf_counter()
        changes: list[Slowdown] = watch.look(done)
        took_s = max(took_s, time.perf_counter() - began)
        found += [(number, change) for change in changes]
    return [*found, took_s]


def measure(ranks: int, runs: int, windows: int, uneven: bool) -> dict[str, Any]:
    """Return the figures of one size."""
    draw = np.random.default_rng(ranks)
    limit = WITHIN_UNEVEN if uneven else WITHIN
    named, wrong, delays, slowest_s = 0, 0, [], 0.0
    for seed in range(runs):
        slow, factor = int(draw.integers(ranks)), float(draw.uniform(1.5 if uneven else 1.3, 3.0))
        # a rank of the last stages: of the first ones, 1.3 times as much is less than what the others do anyway
        slow = max(slow, ranks * 3 // 4)
        *changes, took_s = told(ranks, AT + limit, seed, uneven, slow, factor)
        hits = [number - AT for number, change in changes if change.rank == slow and not change.over and number >= AT]
        wrong += any(change.rank not in (slow, -1) for _, change in changes)
        named += bool(hits)
        delays += hits[:1]
        slowest_s = max(slowest_s, took_s)
    quiet = [one for seed in range(max(1, runs // 10)) for one in told(ranks, windows, 10_000 + seed, uneven)[:-1]]
    blamed = sum(change.rank >= 0 and not change.over for _, change in quiet)
    return {
        "ranks": ranks, "uneven": uneven, "runs": runs, "found": round(named / runs, 4),
        "precision": round(named / max(1, named + wrong + blamed), 4),
        "windows_median": float(np.median(delays)) if delays else None, "windows_worst": max(delays, default=None),
        "quiet_windows": windows * max(1, runs // 10), "falsely_blamed": blamed,
        "all_told": sum(change.rank < 0 and not change.over for _, change in quiet),
        "longest_look_ms": round(1000 * slowest_s, 2),
    }  # fmt: skip


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--windows", type=int, default=1000, help="of each run in which nothing is slow")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for ranks in options.ranks:
        for uneven in (False, True):
            results.append(measure(ranks, options.runs, options.windows, uneven))
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
