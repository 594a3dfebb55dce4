"""Fit the parameters of the cost model to measured iterations: maximum a posteriori within physical bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.efficiency import Bounds

Vector = NDArray[np.float64]
STEP = 1e-4
ROBUST = 1.5  # residuals beyond this many standard deviations pull no harder (Huber)


def fit(residuals: Callable[[Vector], Vector], start: Vector, bounds: Bounds, rounds: int = 30) -> Vector:
    """The values that make ``residuals`` (in standard deviations) and the departure from the beliefs smallest.

    Levenberg–Marquardt in the logarithms of the values, clipped to the bounds. ``residuals`` takes values, not logarithms.
    """
    low, high = np.log(bounds.low), np.log(bounds.high)
    belief = np.log(bounds.prior)

    def all_residuals(x: Vector) -> Vector:
        raw = residuals(np.exp(x))
        size = np.abs(raw)
        robust = np.where(size > ROBUST, np.sqrt(ROBUST * np.maximum(2 * size - ROBUST, ROBUST)), size)
        return np.concatenate([np.sign(raw) * robust, (x - belief) / bounds.spread])

    x = np.clip(np.log(start), low, high)
    now = all_residuals(x)
    damping = 1e-2
    for _ in range(rounds):
        jacobian = np.stack([(all_residuals(x + STEP * unit) - now) / STEP for unit in np.eye(x.size)], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        best = float(now @ now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = np.clip(x - np.clip(step, -0.5, 0.5), low, high)
            then = all_residuals(tried)
            if then @ then < best:
                x, now, damping = tried, then, max(damping / 4, 1e-6)
                break
            damping *= 4
        if best - float(now @ now) < 1e-4 * best:
            break
    return np.exp(x)
