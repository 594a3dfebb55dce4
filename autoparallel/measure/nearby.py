"""Corrections from a cluster's measurements for similar layouts, beyond the model's parameters.

A Gaussian process over ln(time): one part for the cluster as a whole, one that fades with the distance between layouts,
and one that mixtures of experts share with others of the same model. The distances and standard deviations below hold
for all clusters: round numbers that do well on the published tables together, none of them for one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.cost.cost import Cost, Problem, iteration
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

Matrix = NDArray[np.float64]
CLUSTER = 0.12  # standard deviation of ln(time) from cluster to cluster, all else equal
EXPERTS = 0.5  # the same from one mixture of experts to another: their kernels and fusions differ
LAYOUT = 0.1  # the same from layout to layout of one cluster, after the model
NOISE = 0.03  # the same from run to run: BLOOM's logs differ by 3 % within a day, 6.5 % over four days

# doublings after which two layouts have half the influence or less on each other; of the last five: per unit
DISTANCES = {
    "tp": 1.0, "pp": 3.0, "micro_batch": 4.0, "hidden": 3.0, "seq": 3.0, "replicas": 4.0, "micro_batches": 4.0,
    "heads": 4.0, "layers": 8.0, "recompute": 1.0, "zero": 2.0, "experts": 2.0, "precision": 2.0, "arch": 2.0,
}  # fmt: skip
# the same for properties that mixtures of experts share beyond that: the model, its precision, the GPU
ALIKE = {"hidden": 1.0, "heads": 1.0, "layers": 1.0, "precision": 3.0, "arch": 1.0}


def features(problem: Problem) -> Matrix:
    """Return one row per layout; a distance of 1 is far."""
    models, layouts = problem.models, problem.layouts
    doublings = (
        layouts.tp,
        layouts.pp,
        layouts.micro_batch,
        models.hidden,
        models.seq,
        layouts.dp * layouts.cp,
        layouts.micro_batches,
        models.heads,
        models.layers,
    )
    kinds = (
        layouts.recompute,
        layouts.zero,
        (models.experts > 0) * 1.0,
        np.log2(16 / problem.stacks.precision),
        problem.machines.arch,
    )
    columns = np.broadcast_arrays(*(np.log2(column) for column in doublings), *kinds)
    return np.asarray(np.stack(columns, axis=-1) / np.array(list(DISTANCES.values())))


def likeness(first: Matrix, second: Matrix) -> Matrix:
    """Return from 1 for the same layout down to 0."""
    apart = first[:, None, :] - second[None, :, :]
    return np.asarray(np.exp(-np.sqrt((apart**2).sum(-1))))


def shared(first: Matrix, second: Matrix) -> Matrix:
    """Return the covariance of ln(time) of layouts with layouts (``features``), given the parameters of the model."""
    names = list(DISTANCES)
    places = [names.index(name) for name in ALIKE]
    scale = np.array([DISTANCES[name] / distance for name, distance in ALIKE.items()])
    experts = np.outer(first[:, names.index("experts")] > 0, second[:, names.index("experts")] > 0)
    models = experts * likeness(first[:, places] * scale, second[:, places] * scale)
    return np.asarray(CLUSTER**2 + EXPERTS**2 * models + LAYOUT**2 * likeness(first, second))


def covariance(points: Matrix) -> Matrix:
    """Return the covariance of ln(time) of these measurements, given the parameters of the model."""
    return shared(points, points) + NOISE**2 * np.eye(len(points))


@dataclass(frozen=True)
class Nearby:
    """Measured layouts (``features``), and how far ln(time) of similar layouts departs from the model."""

    points: Matrix
    weights: NDArray[np.float64]

    def factor(self, problem: Problem) -> Column:
        """Return the factor for times of the model."""
        return np.asarray(np.exp(shared(features(problem), self.points) @ self.weights))

    def text(self) -> str:
        """Return it as TOML, the end of a calibration."""
        lines = [
            f"[[nearby]]\nweight = {weight:.6g}\nfeatures = [{', '.join(f'{value:.6g}' for value in point)}]\n"
            for point, weight in zip(self.points, self.weights, strict=True)
        ]
        return "".join(lines)


def costed(problem: Problem, efficiency: Efficiency, measured: Nearby | None) -> Cost:
    """Return the model's costs, corrected by measurements of this cluster if there are some."""
    cost = iteration(problem, efficiency)
    if measured is None:
        return cost
    factor = measured.factor(problem)
    return cost.map(lambda column: column * factor)


def read(text: str) -> Nearby | None:
    """Return the part of a calibration that ``Nearby.text`` wrote, if any; UsageError where it is damaged."""
    found = tomllib.loads(text).get("nearby", [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError("calibration: [[nearby]] is no list of tables")
    if not found:
        return None
    return Nearby(np.array([_point(one.get("features")) for one in found]), _numbers([o.get("weight") for o in found]))


def _point(values: object) -> NDArray[np.float64]:
    if not isinstance(values, list) or len(values) != len(DISTANCES):
        raise UsageError(f"calibration: [[nearby]] needs {len(DISTANCES)} features: calibrate again")
    return _numbers(values)


def _numbers(values: Sequence[object]) -> NDArray[np.float64]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e6:
            raise UsageError(f"calibration: [[nearby]] holds {value!r}, which is no number that calibrate wrote")
    return np.array(values, dtype=float)
