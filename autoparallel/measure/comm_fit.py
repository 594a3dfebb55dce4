"""Latency and bandwidth of a collective from measured times: t = α + f(n) · size / B. Pure.

B is the bus bandwidth as nccl-tests define it: the load of each rank's link, so f(n) takes the number of ranks out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.core.errors import UsageError

FACTORS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send-recv": lambda n: 1.0,
}
"""By collective; ``size`` is the whole tensor: an all-gather's result, what a rank sends in an all-to-all."""
SPANS = ("node", "network")
LATENCY_S = (1e-8, 1.0)  # below a memory access, or above any network's
BANDWIDTH = (1e5, 2e13)  # bytes/s: a modem, and ten times NVLink 5


@dataclass(frozen=True)
class Curve:
    """A collective over ``ranks``, ``ranks_per_node`` of them on each node. ``error``: median of |fit / measured - 1|.

    ``span``: "node" for groups inside of a node, "network" for groups over nodes. ``samples_s``: each size's repeats.
    """

    collective: str
    span: str
    ranks: int
    ranks_per_node: int
    latency_s: float
    bandwidth: float
    error: float
    sizes: tuple[int, ...]
    samples_s: tuple[tuple[float, ...], ...]

    @property
    def medians_s(self) -> tuple[float, ...]:
        """Return the median of each size, in seconds."""
        return tuple(float(np.median(samples)) for samples in self.samples_s)

    def time_s(self, size: float) -> float:
        """Return the seconds for a tensor of ``size`` bytes, by the fit."""
        return self.latency_s + FACTORS[self.collective](self.ranks) * size / self.bandwidth


def fit(collective: str, span: str, ranks: int, ranks_per_node: int, samples: Mapping[int, Sequence[float]]) -> Curve:
    """Return the curve through the medians of each size's samples (bytes → seconds).

    Relative deviations are minimised, not their squares: neither the largest size nor a disturbed one decides. Raises
    UsageError for fewer than three sizes, and for an impossible latency or bandwidth.
    """
    sizes = sorted(samples)
    if len(sizes) < 3:
        raise UsageError(f"{collective} ({span}): {len(sizes)} sizes were measured, a fit needs three")
    times = np.array([float(np.median(samples[size])) for size in sizes])
    if not np.all(np.isfinite(times)) or times.min() <= 0:
        raise UsageError(f"{collective} ({span}): a measured time is {times.min():g} s: no clock runs like that")
    loads = np.array([size * FACTORS[collective](ranks) for size in sizes])
    latency, per_byte = _line(loads, times)
    error = float(np.median(np.abs((latency + per_byte * loads) / times - 1)))
    bandwidth = 1 / per_byte if per_byte > 0 else np.inf
    for name, value, (low, high), unit in (
        ("latency", latency, LATENCY_S, "s"),
        ("bandwidth", bandwidth, BANDWIDTH, "bytes/s"),
    ):
        if not low <= value <= high:
            raise UsageError(
                f"{collective} ({span}): a {name} of {value:g} {unit} is not plausible ({low:g} to {high:g}): "
                "measure again on quiet nodes, with larger sizes (--largest)"
            )
    chosen = tuple(tuple(map(float, samples[size])) for size in sizes)
    return Curve(collective, span, ranks, ranks_per_node, latency, bandwidth, error, tuple(sizes), chosen)


def _line(loads: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    """Return (α, β) of least Σ |(α + β load) / time - 1| by iteratively reweighted least squares, neither below 0."""
    rows = np.stack([1 / times, loads / times], axis=1)
    weights = np.ones(len(times))
    alpha, beta = 0.0, 0.0
    for _ in range(30):
        scaled = rows * weights[:, None]
        (alpha, beta), *_ = np.linalg.lstsq(scaled, weights, rcond=None)
        if alpha < 0:
            alpha, beta = 0.0, float(np.median(times / loads))
        if beta < 0:
            alpha, beta = float(np.median(times)), 0.0
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ np.array([alpha, beta]) - 1), 1e-4))
    smallest = float(times.min())
    return max(float(alpha), min(1e-3 * smallest, smallest)), float(beta)
