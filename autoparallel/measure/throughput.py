"""How fast a run is with another number of nodes: linear scaling, less the share of communication. Pure.

A step of a **kept** global batch takes, on n nodes,

    t(n) = a / n + b        b only for n > 1

a / n is computing, which the nodes share; b is communication between nodes, which they do not share: a ring all-reduce
moves 2 (n - 1) / n of the gradients through each node, hardly more with many nodes than with few (Patarasuk and Yuan
2009). a and b are fitted to step times that were measured with different numbers of nodes; where there is one number
only, an assumed share c of the measured step is communication: b = c t, and a = (1 - c) t n.

With a **scaled** global batch (as much per node as before) each node computes what it did: a step takes as long as
with the reference number of nodes, and holds n / reference as many samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from resilio_hpc.autoparallel.base.shapes import Constraints, shapes
from resilio_hpc.core.errors import UsageError

BatchRule = Literal["keep", "scale"]


class Speed(Protocol):
    """What the planner must know of a training program."""

    def step_s(self, nodes: int) -> float:
        """Return the seconds per step with so many nodes."""

    def speed(self, nodes: int) -> float:
        """Return the batches of the reference size per second with so many nodes."""

    def possible(self, nodes: int) -> bool:
        """Return whether the model has a layout on so many nodes, as far as known."""


class RunSpeed(Speed, Protocol):
    """A speed for decisions of the resizer: it knows its source."""

    @property
    def assumed(self) -> bool:
        """Return whether the speed of other sizes is no measurement."""

    @property
    def communication_s(self) -> float:
        """Return the seconds of a step that are communication between nodes."""


@dataclass(frozen=True)
class Measurement:
    """A step took ``step_s`` seconds with ``nodes`` nodes."""

    nodes: int
    step_s: float


@dataclass(frozen=True)
class Throughput:
    """``compute_s``: node seconds of a step (a); ``communication_s``: seconds of a step (b).

    ``assumed``: b is no measurement. ``reference``: the nodes whose batch is the reference, for a scaled batch.
    """

    compute_s: float
    communication_s: float
    assumed: bool
    rule: BatchRule = "keep"
    reference: int = 1

    def step_s(self, nodes: int) -> float:
        """Return the seconds per step with so many nodes."""
        sharing = nodes if self.rule == "keep" else self.reference
        return self.compute_s / sharing + (self.communication_s if nodes > 1 else 0.0)

    def speed(self, nodes: int) -> float:
        """Return the batches of the reference size per second with so many nodes."""
        samples = 1.0 if self.rule == "keep" else nodes / self.reference
        return samples / self.step_s(nodes)

    def possible(self, nodes: int) -> bool:
        """Return True: it knows nothing of layouts."""
        return True


def sizes(speed: Speed, constraints: Constraints) -> list[int]:
    """Return the numbers of nodes that a run can have, the fastest first; of equally fast ones the smaller first."""
    found = [shape.nodes for shape in shapes(constraints) if speed.possible(shape.nodes)]
    return sorted(found, key=lambda nodes: (-speed.speed(nodes), nodes))


def fit(measured: Sequence[Measurement], share: float, rule: BatchRule = "keep", reference: int = 1) -> Throughput:
    """Return the curve through the measurements.

    ``share``: of communication, assumed where the measurements do not tell. Several measurements of one number of nodes
    count as their median. Raises UsageError without any.
    """
    times: dict[int, list[float]] = {}
    for one in measured:
        if one.nodes > 0 and one.step_s > 0:
            times.setdefault(one.nodes, []).append(one.step_s)
    if not times:
        raise UsageError("no step time is known yet")
    points = sorted((nodes, median(found)) for nodes, found in times.items())
    if len(points) == 1 or rule == "scale":
        return _assumed(*_nearest(points, reference), share, rule, reference)
    compute, communication = _line(points)
    return Throughput(compute, communication, False, rule, reference)


def _nearest(points: Sequence[tuple[int, float]], reference: int) -> tuple[int, float]:
    return min(points, key=lambda point: abs(point[0] - reference))


def _assumed(nodes: int, step_s: float, share: float, rule: BatchRule, reference: int) -> Throughput:
    if rule == "scale":
        return Throughput((1 - share) * step_s * reference, share * step_s, True, rule, reference)
    if nodes == 1:  # no node communicated: that cost comes on top
        return Throughput(step_s, share * step_s, True, rule, reference)
    return Throughput((1 - share) * step_s * nodes, share * step_s, True, rule, reference)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the least squares of t = a / n + b [n > 1], neither below 0."""
    rows = [(1 / nodes, 1.0 if nodes > 1 else 0.0, step_s) for nodes, step_s in points]
    xx, xz, zz = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xt, zt = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = xx * zz - xz * xz
    compute = (xt * zz - zt * xz) / determinant
    communication = (zt * xx - xt * xz) / determinant
    if communication < 0:
        return xt / xx, 0.0
    return (compute, communication) if compute > 0 else (0.0, zt / zz)
