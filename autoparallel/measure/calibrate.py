"""Fits the parameters of the cost model to a cluster, and chooses the runs that tell most of them.

Both use one belief about ln(time): the cold prediction, its slopes by parameter, and what similar layouts share
(``nearby.py``). The fit is its maximum a posteriori within physical bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import NAMES, Efficiency, bounds
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.measure.nearby import NOISE, Nearby, covariance, features, shared
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.measure.unstated import problem

Vector = NDArray[np.float64]
STEP = 1e-4
BETWEEN_CLUSTERS = 0.6  # of a parameter's spread: how much clusters differ in it
GAUSS_NEWTON = 3


def jacobian(function: Callable[[Vector], Vector], x: Vector, there: Vector) -> Vector:
    """Return the derivatives at ``x``; ``there``: the function's value."""
    return np.stack([(function(x + STEP * unit) - there) / STEP for unit in np.eye(x.size)], axis=1)


def _log_time(asked: Problem, known: Efficiency) -> Callable[[Vector], Vector]:
    """Return ln(time) as a function of the logarithms of the parameters."""
    return lambda x: np.asarray(np.log(iteration(asked, known.with_vector(np.exp(x))).iteration))


def _variances(fixed: Collection[str]) -> Vector:
    """Return how far clusters differ: the variance of each parameter's logarithm; 0 for those of ``fixed``."""
    free = np.array([name not in fixed for name in NAMES])
    return np.asarray(free * (bounds().spread * BETWEEN_CLUSTERS) ** 2)


def calibrate(
    known: Efficiency, cases: Sequence[Case], times: Vector, fixed: Collection[str] = ()
) -> tuple[Efficiency, Nearby]:
    """Return the parameters of one cluster from a few of its measurements, and corrections for similar layouts.

    Parameters depart from ``known`` by as little as the measurements allow (Gauss-Newton on the joint posterior);
    those of ``fixed`` not at all, since a profile has measured them.
    """
    asked, limits, variances = problem(cases), bounds(), _variances(fixed)
    low, high = np.log(limits.low), np.log(limits.high)
    measured, points = np.log(times), features(asked)
    predicted = _log_time(asked, known)
    start = np.log(known.vector())
    x = start
    for _ in range(GAUSS_NEWTON):
        now = predicted(x)
        slopes = jacobian(predicted, x, now)
        total = (slopes * variances) @ slopes.T + covariance(points)
        moved = slopes.T @ np.linalg.solve(total, measured - now + slopes @ (x - start))
        x = np.clip(start + variances * moved, low, high)
    left = measured - predicted(x)
    weights = np.asarray(np.linalg.solve(covariance(points), left), dtype=np.float64)
    return known.with_vector(np.exp(x)), Nearby(points, weights)


@dataclass(frozen=True)
class ChosenRuns:
    """Runs to measure, the one that tells most first: places in the list of cases.

    ``doubt``: standard deviation of ln(time), the root of its mean square over the targets: before any of these runs,
    and after each of them.
    """

    places: tuple[int, ...]
    doubt: tuple[float, ...]


def choose_runs(
    known: Efficiency,
    cases: Sequence[Case],
    count: int,
    targets: Sequence[bool] | None = None,
    allowed: Sequence[bool] | None = None,
    measured: Sequence[bool] | None = None,
    fixed: Collection[str] = (),
) -> ChosenRuns:
    """Return the ``count`` runs after which least doubt is left about the times of the ``targets`` (all, if not given).

    No measured time is looked at: in a linearised model the doubt that is left depends on the layouts alone. The next
    run is always the one that takes most of the variance away. ``allowed``: cases that may be run; ``measured``: cases
    whose time is known already; ``fixed``: as in ``calibrate``.
    """
    asked = problem(cases)
    predicted, points = _log_time(asked, known), features(asked)
    start = np.log(known.vector())
    slopes = jacobian(predicted, start, predicted(start))
    left = (slopes * _variances(fixed)) @ slopes.T + shared(points, points)
    every = np.ones(len(cases), dtype=bool)
    wanted = np.asarray(every if targets is None else targets, dtype=bool)
    known_times = np.asarray(~every if measured is None else measured, dtype=bool)
    free = np.asarray(every if allowed is None else allowed, dtype=bool) & ~known_times
    for place in np.flatnonzero(known_times).tolist():
        left = _after(left, place)
    places, doubt = list[int](), [_doubt(left, wanted)]
    while len(places) < min(count, int(free.sum()) + len(places)):
        gain = (left[wanted] ** 2).sum(axis=0) / (np.diag(left) + NOISE**2)
        place = int(np.where(free, gain, -1.0).argmax())
        free[place] = False
        left = _after(left, place)
        places.append(place)
        doubt.append(_doubt(left, wanted))
    return ChosenRuns(tuple(places), tuple(doubt))


def _after(left: Vector, place: int) -> Vector:
    """Return the covariance once this run has been measured."""
    return np.asarray(left - np.outer(left[:, place], left[place]) / (left[place, place] + NOISE**2))


def _doubt(left: Vector, wanted: NDArray[np.bool_]) -> float:
    return float(np.sqrt(np.maximum(np.diag(left)[wanted], 0.0).mean())) if wanted.any() else 0.0
