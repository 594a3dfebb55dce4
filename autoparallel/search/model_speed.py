"""The full cost model as a speed for the resizer: how fast a run is on so many nodes. RES-23.

Each number of nodes gets its best layout; measured step times scale the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.layout import Layout
from resilio_hpc.autoparallel.measure.throughput import Measurement
from resilio_hpc.autoparallel.search.ranking import Training, at_shape, communication, find
from resilio_hpc.core.errors import UsageError

NEVER_S = 1e12  # of a step without a possible layout: finite, since sizes are compared by their ratios
Degrees = Callable[[int], tuple[int, int] | None]
"""(tensor, pipeline) parallel of so many ranks where they are given, else None."""


def any_degrees(ranks: int) -> tuple[int, int] | None:
    """Return no degrees: the best layout counts, whatever its degrees."""
    return None


@dataclass(frozen=True)
class Planned:
    """The best predicted layout of a number of nodes; None: no layout is possible."""

    step_s: float = NEVER_S
    communication_s: float = 0.0
    layout: Layout | None = None


@dataclass(frozen=True)
class ModelSpeed:
    """A ``Speed``. ``machine``: a whole node; ``measured``: of this run, may be empty.

    ``nodes``: the present number, to which ``communication_s`` belongs. ``assumed``: the speed of other sizes is
    predicted.
    """

    training: Training
    machine: Machine
    ranks_per_node: int
    degrees: Degrees = any_degrees
    measured: tuple[Measurement, ...] = ()
    nodes: int = 1
    assumed: bool = True
    _known: dict[int, Planned] = field(default_factory=dict, compare=False, repr=False)

    def step_s(self, nodes: int) -> float:
        """Return the seconds per step with so many nodes; ``NEVER_S`` where no layout is possible."""
        return self.planned(nodes).step_s * self.scale(nodes)

    def speed(self, nodes: int) -> float:
        """Return the batches per second with so many nodes."""
        return 1 / self.step_s(nodes)

    def possible(self, nodes: int) -> bool:
        """Return whether there is a layout."""
        return self.planned(nodes).layout is not None

    @property
    def communication_s(self) -> float:
        """Return the seconds of communication in a step of the run as it is now."""
        return self.planned(self.nodes).communication_s * self.scale(self.nodes)

    def scale(self, nodes: int) -> float:
        """Return measured over predicted, for the nearest measured number of nodes; 1 without any."""
        ratios: dict[int, list[float]] = {}
        for one in self.measured:
            predicted = self.planned(one.nodes).step_s if one.nodes > 0 and one.step_s > 0 else NEVER_S
            if predicted < NEVER_S:
                ratios.setdefault(one.nodes, []).append(one.step_s / predicted)
        if not ratios:
            return 1.0
        return median(ratios[min(ratios, key=lambda size: (abs(math.log(size / nodes)), size))])

    def planned(self, nodes: int) -> Planned:
        """Return the prediction, from one search for each number of nodes."""
        if nodes not in self._known:
            self._known[nodes] = self._search(nodes)
        return self._known[nodes]

    def _search(self, nodes: int) -> Planned:
        ranks = nodes * self.ranks_per_node
        given = self.degrees(ranks)
        space = self.training.space
        if given is not None:
            space = replace(space, only={**space.only, "tp": given[0], "pp": given[1]})
        machine = at_shape(self.machine, min(self.ranks_per_node, self.machine.node_gpus))
        found = find(replace(self.training, space=space), machine, ranks)
        if not found.cost.iteration.size:
            return Planned()
        return Planned(float(found.cost.iteration[0]), float(communication(found.cost)[0]), found.layouts.row(0))


@dataclass(frozen=True)
class SpeedModel:
    """What is known of a run's model before the run is seen; makes its ``ModelSpeed``.

    ``on``: (type, GPUs of a node) of the run's nodes → the training and their machine, with its measurements; raises
    UsageError for an unknown one.
    """

    on: Callable[[str, int], tuple[Training, Machine]]

    def speed(
        self, measured: Sequence[Measurement], nodes: int, ranks_per_node: int, gpu: tuple[str, int], degrees: Degrees
    ) -> ModelSpeed:
        """Return the speed of a run of ``nodes`` nodes with these GPUs. Raises UsageError where it could not run."""
        training, machine = self.on(gpu[0], gpu[1] or ranks_per_node)
        speed = ModelSpeed(training, machine, ranks_per_node, degrees, tuple(measured), nodes)
        if not speed.possible(nodes):
            name, batch = training.model.name, training.global_batch
            raise UsageError(
                f"--model {name}: no layout of it runs on the {nodes} x {ranks_per_node} {machine.gpu} of this run "
                f"with a global batch of {batch}, its --layout kept: is it this model, GPU and batch?"
            )
        return speed
