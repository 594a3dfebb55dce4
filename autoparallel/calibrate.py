"""Fit the parameters of the cost model to measured iterations: maximum a posteriori within physical bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.cost import iteration
from resilio_hpc.autoparallel.efficiency import Bounds, Efficiency, bounds, shipped
from resilio_hpc.autoparallel.predict import problem
from resilio_hpc.autoparallel.rows import Case

Vector = NDArray[np.float64]
STEP = 1e-4
ROBUST = 1.5  # residuals beyond this many standard deviations pull no harder (Huber)
ROWS_PER_FILE = 40  # a file weighs at most as much as this many rows of its own
SAMPLE = 120  # rows of one file that take part
NOISE = 0.08  # standard deviation of ln(time) that the model is believed to leave
NOISE_CALIBRATED = 0.04


def fit(residuals: Callable[[Vector], Vector], start: Vector, limits: Bounds, rounds: int = 12) -> Vector:
    """The values that make ``residuals`` (in standard deviations) and the departure from the beliefs smallest.

    Levenberg–Marquardt in the logarithms of the values, clipped to the bounds. ``residuals`` takes values themselves.
    """
    low, high = np.log(limits.low), np.log(limits.high)
    belief = np.log(limits.prior)

    def weighed(x: Vector) -> Vector:
        raw = residuals(np.exp(x))
        size = np.abs(raw)
        robust = np.where(size > ROBUST, np.sqrt(ROBUST * np.maximum(2 * size - ROBUST, ROBUST)), size)
        return np.concatenate([np.sign(raw) * robust, (x - belief) / limits.spread])

    x = np.clip(np.log(start), low, high)
    now = weighed(x)
    damping = 1e-2
    for _ in range(rounds):
        jacobian = np.stack([(weighed(x + STEP * unit) - now) / STEP for unit in np.eye(x.size)], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        best = float(now @ now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = np.clip(x - np.clip(step, -0.5, 0.5), low, high)
            then = weighed(tried)
            if then @ then < best:
                x, now, damping = tried, then, max(damping / 4, 1e-6)
                break
            damping *= 4
        if best - float(now @ now) < 1e-4 * best:
            break
    return np.asarray(np.exp(x))


def _posterior(cases: Sequence[Case], times: Vector, deviations: Vector, limits: Bounds) -> Efficiency:
    asked, base = problem(cases), shipped()

    def residuals(values: Vector) -> Vector:
        predicted = iteration(asked, base.with_vector(values)).iteration
        return np.asarray(np.log(predicted / times) / deviations)

    return base.with_vector(fit(residuals, limits.prior, limits))


def fit_files(files: Sequence[tuple[Sequence[Case], Vector]]) -> Efficiency:
    """One set of parameters for several tables of measurements, none of which may outweigh the others.

    Two passes: how much noise a table has is taken from the residuals of the first.
    """
    chosen = []
    for cases, times in files:
        picks = np.random.default_rng(0).permutation(len(cases))[:SAMPLE]
        chosen.append(([cases[i] for i in picks], times[picks]))
    cases = [case for some, _ in chosen for case in some]
    times = np.concatenate([times for _, times in chosen])
    sizes = [len(some) for some, _ in chosen]
    weights = np.concatenate([np.full(n, np.sqrt(min(n, ROWS_PER_FILE) / n)) for n in sizes])
    first = _posterior(cases, times, NOISE / weights, bounds())
    error = np.abs(np.log(iteration(problem(cases), first).iteration / times))
    parts = np.split(error, np.cumsum(sizes)[:-1])
    noise = np.concatenate([np.full(len(p), np.clip(1.48 * np.median(p), 0.05, 0.3)) for p in parts])
    return _posterior(cases, times, noise / weights, bounds())


def calibrate(known: Efficiency, cases: Sequence[Case], times: Vector) -> Efficiency:
    """The parameters of one cluster from a few of its measurements, starting at what is known without them."""
    limits = bounds()
    belief = replace(limits, prior=np.clip(known.vector(), limits.low, limits.high))
    return _posterior(cases, times, np.full(len(cases), NOISE_CALIBRATED), belief)


def calibrated(known: Efficiency, cases: Sequence[Case], times: Vector) -> Callable[[Sequence[Case]], Vector]:
    """What predicts times after calibration with these rows."""
    found = calibrate(known, cases, times)

    def predicted(asked: Sequence[Case]) -> Vector:
        return iteration(problem(asked), found).iteration

    return predicted
