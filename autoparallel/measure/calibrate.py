"""Fits the parameters of the cost model to a cluster: maximum a posteriori within physical bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import Efficiency, bounds
from resilio_hpc.autoparallel.cost.cost import iteration
from resilio_hpc.autoparallel.measure.nearby import Nearby, covariance, features
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.measure.unstated import problem

Vector = NDArray[np.float64]
STEP = 1e-4
BETWEEN_CLUSTERS = 0.6  # of a parameter's spread: how much clusters differ in it
GAUSS_NEWTON = 3


def jacobian(function: Callable[[Vector], Vector], x: Vector, there: Vector) -> Vector:
    """Return the derivatives at ``x``; ``there``: the function's value."""
    return np.stack([(function(x + STEP * unit) - there) / STEP for unit in np.eye(x.size)], axis=1)


def calibrate(known: Efficiency, cases: Sequence[Case], times: Vector) -> tuple[Efficiency, Nearby]:
    """Return the parameters of one cluster from a few of its measurements, and corrections for similar layouts.

    Parameters depart from ``known`` by as little as the measurements allow (Gauss-Newton on the joint posterior).
    """
    asked, limits = problem(cases), bounds()
    low, high = np.log(limits.low), np.log(limits.high)
    measured, points = np.log(times), features(asked)

    def predicted(x: Vector) -> Vector:
        return np.asarray(np.log(iteration(asked, known.with_vector(np.exp(x))).iteration))

    start = np.log(known.vector())
    spread = (limits.spread * BETWEEN_CLUSTERS) ** 2
    x = start
    for _ in range(GAUSS_NEWTON):
        now = predicted(x)
        slopes = jacobian(predicted, x, now)
        total = (slopes * spread) @ slopes.T + covariance(points)
        moved = slopes.T @ np.linalg.solve(total, measured - now + slopes @ (x - start))
        x = np.clip(start + spread * moved, low, high)
    left = measured - predicted(x)
    weights = np.asarray(np.linalg.solve(covariance(points), left), dtype=np.float64)
    return known.with_vector(np.exp(x)), Nearby(points, weights)
