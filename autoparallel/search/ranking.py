"""Every offered shape with its best layouts, ranked; and the choices that no other beats. Pure. RES-18 to RES-21."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.measure.nearby import Nearby
from resilio_hpc.autoparallel.measure.predict import half_width
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.failures import Reliability, overhead, run_s
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.autoparallel.search.search import Found, search

BEST = 5  # layouts of a shape that are shown beside one another
STEP_OF_MEMORY = 0.05  # of a GPU: additional free memory that makes another layout of a shape a choice of its own


@dataclass(frozen=True)
class Training:
    """The training: model, software, and the quality of its cost model. ``global_batch``: sequences.

    ``measured``: by the GPU's name, where a profile says more than ``efficiency``. ``headroom``: part of a GPU's memory
    that must stay free.
    """

    model: Transformer
    global_batch: int
    efficiency: Efficiency
    stack: Stack = field(default_factory=Stack)
    space: Space = field(default_factory=Space)
    calibrated: bool = False
    nearby: Nearby | None = None
    measured: Mapping[str, Efficiency] = field(default_factory=dict)
    headroom: float = 0.0

    def efficiency_on(self, machine: Machine) -> Efficiency:
        """Return the efficiency of this machine."""
        return self.measured.get(machine.gpu, self.efficiency)


@dataclass(frozen=True)
class Searched:
    """One offer with its choices, the fastest first, and the number of layouts looked at.

    Without choices, none fits. ``choices``: the fastest, and slower ones that leave more memory free; ``best``: the
    fastest few, whatever they leave.
    """

    offer: Offer
    choices: tuple[Choice, ...]
    looked_at: int
    too_large: int
    least_excess: float
    best: tuple[Choice, ...] = ()


def at_shape(machine: Machine, ranks_per_node: int) -> Machine:
    """Return a node for a job that has only so many of its GPUs, and as large a share of its network."""
    domain = machine.domain_gpus if machine.domain_gpus > machine.node_gpus else ranks_per_node
    nic = machine.nic_gbytes_s * min(1.0, ranks_per_node / machine.node_gpus)
    return replace(machine, node_gpus=ranks_per_node, domain_gpus=domain, nic_gbytes_s=nic)


def search_offers(
    offers: Sequence[Offer], training: Training, machines: Mapping[str, Machine], run: Reliability
) -> list[Searched]:
    """Return each offer with its choices, in the offers' order. ``machines``: by the offers' ``gpu``."""
    known: dict[tuple[str, int, int], tuple[Found, Found]] = {}
    done = []
    for offer in offers:
        key = (offer.gpu, offer.shape.nodes, offer.shape.ranks_per_node)
        machine = at_shape(machines[offer.gpu], offer.shape.ranks_per_node)
        if key not in known:
            every = find(training, machine, offer.shape.ranks)
            known[key] = _thinned(every, machine), rows_of(every, range(min(BEST, every.cost.iteration.size)))
        found, first = known[key]
        choices = choices_of(offer, found, training, machine, run)
        excess = found.least_excess if found.looked_at else 0.0
        best = choices_of(offer, first, training, machine, run)
        done.append(Searched(offer, choices, found.looked_at, found.too_large, excess, best))
    return done


def find(training: Training, machine: Machine, gpus: int) -> Found:
    """Return every layout of so many GPUs."""
    efficiency, nearby = training.efficiency_on(machine), training.nearby
    asked = (training.model, machine, gpus, training.global_batch, training.stack, training.space)
    return search(*asked, efficiency, nearby, training.headroom)


def _thinned(found: Found, machine: Machine) -> Found:
    """Return the fastest layout, and each slower one that leaves clearly more memory free."""
    kept, least = list[int](), math.inf
    device = found.memory.device
    step = STEP_OF_MEMORY * machine.memory_gb * 1e9
    lowest = np.minimum.accumulate(device) if device.size else device
    for row in np.flatnonzero(device <= lowest):  # only a layout with less memory than all faster ones can be a choice
        if device[row] <= least - (step if kept else 0):
            kept.append(int(row))
            least = float(device[row])
    return rows_of(found, kept) if kept else found


def rows_of(found: Found, rows: Sequence[int]) -> Found:
    """Return only these layouts."""
    if not found.cost.iteration.size:
        return found
    index = np.array(rows, dtype=np.intp)
    layouts = found.layouts.full(len(found.layouts)).take(index)
    return replace(found, layouts=layouts, cost=found.cost.take(index), memory=found.memory.take(index))


def communication(cost: Cost) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the seconds of an iteration in which data moves and nothing is computed."""
    parts = (cost.tensor_parallel, cost.expert_parallel, cost.context_parallel, cost.pipeline_transfers)
    return np.asarray(sum(parts) + cost.data_parallel)


def choices_of(
    offer: Offer, found: Found, training: Training, machine: Machine, run: Reliability
) -> tuple[Choice, ...]:  # fmt: skip
    """Every row of ``found`` as a choice."""
    if not found.cost.iteration.size:
        return ()
    model = Transformers.of([training.model])
    asked = Problem(model, found.layouts, Machines.of([machine]), Stacks.of([training.stack]))
    width = np.exp(half_width(asked, found.cost, training.calibrated))
    width = np.broadcast_to(width, found.cost.iteration.shape)
    tokens = training.global_batch * training.model.seq
    each = tokens / offer.shape.ranks
    flops, peak = float(model.flops_per_token[0]) * each, peak_flops(machine, training.stack)
    moving, device, cost = communication(found.cost), found.memory.device, found.cost
    choices = []
    for row, time in enumerate(map(float, cost.iteration)):
        choices.append(
            Choice(
                offer, found.layouts.row(row), time, time / float(width[row]), time * float(width[row]),
                mfu=flops / time / peak, bubble=float(cost.bubble[row]) / time, communication=float(moving[row]) / time,
                memory_bytes=float(device[row]), gpu_bytes=machine.memory_gb * 1e9,
                overhead=overhead(run, offer.shape.nodes, time), run_s=run_s(run, offer.shape.nodes, time),
                tokens_s=each / time, flops_s=flops / time,
            )
        )  # fmt: skip
    return tuple(choices)


def peak_flops(machine: Machine, stack: Stack) -> float:
    """Return the data sheet's FLOP/s at the precision of the matrix products."""
    return {4: machine.fp4 or machine.bf16, 8: machine.fp8 or machine.bf16}.get(stack.precision, machine.bf16) * 1e12


# -- ranking -----------------------------------------------------------------------------------------------------------

RANKS: Mapping[str, Callable[[Choice], tuple[float, ...]]] = {
    "time": lambda one: (one.iteration_s, one.gpus),
    "gpu-hours": lambda one: (one.gpu_hours, one.iteration_s),
    "finish": lambda one: (one.offer.wait_s is None, one.finish_s, one.gpus),
}
"""By name; those whose wait is unknown finish last."""


def ranked(searched: Iterable[Searched], by: str) -> list[Choice]:
    """Return the best layout of every offer, the best offer first; of equal ones that with most GPUs per node."""
    best = [min(one.choices, key=RANKS[by]) for one in searched if one.choices]
    return sorted(best, key=RANKS[by])


def pareto(searched: Iterable[Searched]) -> list[Choice]:
    """Choices that no other beats in time, GPUs, free memory and time lost to failures at once; the fastest first."""
    every = [choice for one in searched for choice in one.choices]
    every.sort(key=lambda one: (one.iteration_s, one.gpus, -one.headroom_bytes))
    if not every:
        return []
    points = np.array([_point(one) for one in every])
    front = list[int]()
    for row, point in enumerate(points):
        if not front or not np.any(np.all(points[front] <= point, axis=1)):
            front.append(row)
    return [every[row] for row in front]


def _point(one: Choice) -> tuple[float, float, float, float]:
    return one.iteration_s, float(one.gpus), -one.headroom_bytes, one.overhead
