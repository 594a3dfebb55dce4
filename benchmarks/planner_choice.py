"""Calibrated with six runs that the planner chooses, and with six at random: the error on all other rows.

usage: planner_choice.py DATA [--rows 6] [--draws 40]

One cluster is left out at a time: its rows are the candidates, no row of its source is in the fit that they start from,
and the choice sees no measured time. Two views: each table as one cluster, and each kind of GPU of a table (12 rows or
more) as one. ``same rows``: both choose among a random half, and are scored on the other half, so that neither profits
from taking the odd rows out. ``best of draws``: the random six that did best, which cannot be known beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner_accuracy import File, fitted, load, others, scorer
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.measure.calibrate import calibrate, choose_runs
from resilio_hpc.autoparallel.measure.predict import predict
from resilio_hpc.autoparallel.measure.rows import Case

FEWEST = 12  # rows of a cluster
HALVES = 15


@dataclass(frozen=True)
class Cluster:
    """One cluster's rows, and the parameters that were fitted without them."""

    name: str
    cold: Efficiency
    cases: list[Case]
    times: NDArray[np.float64]

    def error(self, seen: list[int], scored: NDArray[np.int_]) -> float:
        """Return the mean error in % on the scored rows after calibration with ``seen``."""
        known, nearby = calibrate(self.cold, [self.cases[i] for i in seen], self.times[seen])
        told = predict([self.cases[i] for i in scored], known, calibrated=True, nearby=nearby).cost.iteration
        return float(np.abs(told / self.times[scored] - 1).mean() * 100)

    def chosen(self, count: int, pool: NDArray[np.int_]) -> list[int]:
        """Return the rows of the pool that tell most of all rows of the pool."""
        among = np.isin(np.arange(len(self.cases)), pool).tolist()
        return list(choose_runs(self.cold, self.cases, count, targets=among, allowed=among).places)


def clusters(files: list[File], by_gpu: bool) -> Iterator[Cluster]:
    """Yield tables, or the kinds of GPU of each table."""
    for file in files:
        if not file.timed or len(file.cases) < FEWEST:
            continue
        cold = fitted(others(files, file))
        gpus = np.array([case.machine.gpu if by_gpu else "" for case in file.cases])
        for gpu in dict.fromkeys(gpus.tolist()):
            rows = np.flatnonzero(gpus == gpu)
            if rows.size >= FEWEST:
                name = f"{Path(file.name).stem} {gpu}".strip()
                yield Cluster(name, cold, [file.cases[i] for i in rows], file.times[rows])


def judged(one: Cluster, count: int, draws: int) -> dict[str, float]:
    """Return errors in %: cold, of random rows and of chosen ones."""
    every = np.arange(len(one.cases))
    told = predict(one.cases, one.cold).cost.iteration
    found = {"cold": float(np.abs(told / one.times - 1).mean() * 100)}
    random = []
    for seed in range(draws):
        seen = np.random.default_rng(seed).permutation(every)[:count]
        random.append(one.error(seen.tolist(), np.setdiff1d(every, seen)))
    seen = one.chosen(count, every)
    found |= {"random": statistics.median(random), "chosen": one.error(seen, np.setdiff1d(every, seen))}
    found["best of draws"] = min(random)
    halves = list[tuple[float, float]]()
    for seed in range(HALVES):
        mixed = np.random.default_rng(10_000 + seed).permutation(every)
        pool, scored = mixed[: every.size // 2], mixed[every.size // 2 :]
        halves.append((one.error(pool[:count].tolist(), scored), one.error(one.chosen(count, pool), scored)))
    found["same rows: random"], found["chosen "] = (statistics.median(column) for column in zip(*halves, strict=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--draws", type=int, default=40)
    asked = parser.parse_args()
    files = load(asked.data, scorer(asked.data))
    for by_gpu in (False, True):
        print(f"{asked.rows} rows; a cluster is {'a kind of GPU of a table' if by_gpu else 'a table'}")
        rows = []
        for one in clusters(files, by_gpu):
            found = judged(one, asked.rows, asked.draws)
            rows.append(found)
            print(f"  {one.name:<34}{len(one.cases):5}  {text(found)}", flush=True)
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        print(f"  {'mean':<39}  {text(mean)}", flush=True)
    return 0


def text(found: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:5.2f}" for key, value in found.items())


if __name__ == "__main__":
    sys.exit(main())
