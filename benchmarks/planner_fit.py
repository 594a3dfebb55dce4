"""Fit the shipped parameters of the cost model to published measurements: maximum a posteriori, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import Bounds, Efficiency, bounds, shipped
from resilio_hpc.autoparallel.cost.cost import iteration
from resilio_hpc.autoparallel.measure.calibrate import Vector, jacobian
from resilio_hpc.autoparallel.measure.nearby import CLUSTER, EXPERTS
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.measure.unstated import problem

ROBUST = 1.5  # residuals beyond this many standard deviations pull no harder (Huber)
ROWS_PER_FILE = 40  # a file weighs at most as much as this many rows of its own
SAMPLE = 120  # rows of one file that take part
NOISE = 0.08  # standard deviation of ln(time) that the model is believed to leave


def fit(residuals: Callable[[Vector], Vector], start: Vector, limits: Bounds, rounds: int = 24) -> Vector:
    """Return the values that make ``residuals`` (in standard deviations) and the departure from the beliefs smallest.

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
        slopes = jacobian(weighed, x, now)
        normal, gradient = slopes.T @ slopes, slopes.T @ now
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


def _posterior(
    cases: Sequence[Case], times: Vector, deviations: Vector, clusters: NDArray[np.int_], spreads: Vector
) -> tuple[Efficiency, Vector]:
    """Parameters common to all clusters, and one factor of each cluster on all its times."""
    asked, base, limits = problem(cases), shipped(), bounds()
    size, ones = limits.prior.size, np.ones(spreads.size)
    whole = Bounds(
        low=np.append(limits.low, ones / 2),
        high=np.append(limits.high, ones * 2),
        prior=np.append(limits.prior, ones),
        spread=np.append(limits.spread, spreads),
    )

    def residuals(values: Vector) -> Vector:
        predicted = iteration(asked, base.with_vector(values[:size])).iteration * values[size:][clusters]
        return np.asarray(np.log(predicted / times) / deviations)

    found = fit(residuals, whole.prior, whole)
    return base.with_vector(found[:size]), found[size:]


def _level(case: Case) -> tuple[str, float]:
    """Return what shares a factor of its own, and how large that may be (standard deviation of its logarithm)."""
    model, gpu = case.model, case.machine.gpu
    return (f"{gpu} {model.layers}x{model.hidden}x{model.experts}", EXPERTS) if model.experts else (gpu, CLUSTER)


def fit_files(files: Sequence[tuple[Sequence[Case], Vector]]) -> Efficiency:
    """One set of parameters for several tables of measurements, none of which may outweigh the others.

    Two passes: how much noise a table has is taken from the residuals of the first.
    """
    chosen = []
    for cases, times in (file for file in files if file[0]):
        picks = np.random.default_rng(0).permutation(len(cases))[:SAMPLE]
        chosen.append(([cases[i] for i in picks], times[picks]))
    cases = [case for some, _ in chosen for case in some]
    times = np.concatenate([times for _, times in chosen])
    sizes = [len(some) for some, _ in chosen]
    weights = np.concatenate([np.full(n, np.sqrt(min(n, ROWS_PER_FILE) / n)) for n in sizes])
    names = [(number, _level(case)) for number, (some, _) in enumerate(chosen) for case in some]
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    clusters = np.array([known[name] for name in names])
    spreads = np.array([spread for _, (_, spread) in known])
    first, levels = _posterior(cases, times, NOISE / weights, clusters, spreads)
    error = np.abs(np.log(iteration(problem(cases), first).iteration * levels[clusters] / times))
    parts = np.split(error, np.cumsum(sizes)[:-1])
    noise = np.concatenate([np.full(len(p), np.clip(1.48 * np.median(p), 0.05, 0.3)) for p in parts])
    return _posterior(cases, times, noise / weights, clusters, spreads)[0]
