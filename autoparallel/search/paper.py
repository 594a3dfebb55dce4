"""``--cost paper``: the Resilio paper's own planner, for comparison with the fuller model. RES-18, RES-20. Pure.

Algorithm 1 chooses one layout for each shape, formula (3) gives its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.cost.stage_times import stage_times
from resilio_hpc.autoparallel.model.transformer import Transformers
from resilio_hpc.autoparallel.search.choice import Offer
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.layout_space import divisors
from resilio_hpc.autoparallel.search.ranking import Searched, Training, at_shape, choices_of
from resilio_hpc.autoparallel.search.search import Found

STATE_BYTES = 16  # per parameter: weights and gradients in half precision, fp32 weights, two moments


def search_offers(
    offers: Sequence[Offer], training: Training, machines: Mapping[str, Machine], run: Reliability
) -> list[Searched]:
    """Return each offer with algorithm 1's layout, if there is one and it fits."""
    together: dict[tuple[str, str, int], list[Offer]] = {}
    for offer in offers:
        together.setdefault((offer.partition, offer.gpu, offer.shape.ranks), []).append(offer)
    found: dict[Offer, Searched] = {}
    for (_, gpu, gpus), some in together.items():
        rows = _degrees(gpus, some, training, machines[gpu])
        found.update(
            {offer: _searched(offer, rows.get(offer.shape.nodes), training, machines[gpu], run) for offer in some}
        )
    return [found[offer] for offer in offers]


def why_none(searched: Sequence[Searched]) -> str:
    """Return why no shape has a layout."""
    large = [one for one in searched if one.least_excess > 0]
    if not large:
        return "algorithm 1 gives no shape a layout whose stages have layers and whose replicas share the batch"
    near = min(large, key=lambda one: one.least_excess)
    shape = f"{near.offer.shape.nodes} x {near.offer.shape.ranks_per_node}"
    return (
        f"no layout of algorithm 1 fits; that of {shape} lacks least, {near.least_excess / 1e9:.1f} GB per GPU: more "
        "nodes (more stages), or --cost full, which looks at all layouts"
    )


def _degrees(gpus: int, offers: Sequence[Offer], training: Training, machine: Machine) -> dict[int, Degrees]:
    """Return algorithm 1's rows by the number of nodes, which is pp."""
    offered = {offer.shape for offer in offers}
    held = float(Transformers.of([training.model]).parameters[0]) * STATE_BYTES
    rows = algorithm_1(
        gpus, offered.__contains__, lambda shape: feasible(shape, training), held, machine.memory_gb * 1e9
    )  # fmt: skip
    return {row.pp: row for row in rows}


def _searched(
    offer: Offer, degrees: Degrees | None, training: Training, machine: Machine, run: Reliability
) -> Searched:  # fmt: skip
    micro = training.space.only.get("micro_batch", 1)
    if degrees is None or degrees.pp > training.model.layers or training.global_batch % (degrees.dp * micro):
        return Searched(offer, (), 0, 0, 0.0)
    layout = replace(_given(training), tp=degrees.tp, pp=degrees.pp, dp=degrees.dp)
    machine = at_shape(machine, offer.shape.ranks_per_node)
    found, excess = _costed(layout, training, machine)
    if excess > 0:
        return Searched(offer, (), 1, 1, excess)
    return Searched(offer, choices_of(offer, found, training, machine, run), 1, 0, 0.0)


def feasible(shape: Shape, training: Training) -> bool:
    """Return filter two: at least as many layers as stages, and a batch that some split of a node can share."""
    shared = any(training.global_batch % dp == 0 for dp in divisors(shape.ranks_per_node))
    return shape.nodes <= training.model.layers and shared


def _given(training: Training) -> Layout:
    """Return what the paper's algorithm leaves open, as the user gave it.

    By default micro-batches of one sequence, all kept.
    """
    space = training.space
    kind = space.recompute[0] if len(space.recompute) == 1 else Recompute.NONE
    zero = space.zero[0] if len(space.zero) == 1 else 0
    micro = space.only.get("micro_batch", 1)
    return Layout(micro_batch=micro, global_batch=training.global_batch, recompute=kind, zero=zero)


def _costed(layout: Layout, training: Training, machine: Machine) -> tuple[Found, float]:
    """Return the layout with formula (3)'s time, and the bytes by which it does not fit."""
    asked = Problem(
        Transformers.of([training.model]), Layouts.of([layout]), Machines.of([machine]), Stacks.of([training.stack])
    )
    efficiency = training.efficiency_on(machine)
    full = iteration(asked, efficiency).full(1)
    stages, transfers = stage_times(full, asked, layout, efficiency)
    time = formula_3(stages, transfers, layout.micro_batches)
    counted = np.array([time])
    bubble = np.array([time - layout.micro_batches * max(stages)])
    cost = replace(full, iteration=counted, bubble=bubble, data_parallel=np.zeros(1), optimizer=np.zeros(1))
    held = memory(asked)
    return Found(asked.layouts, cost, held, 1, 0, 0.0, layout), float(held.device[0] - machine.memory_gb * 1e9)


# -- algorithm 1 and formula (3) ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Degrees:
    """One row of algorithm 1's matrix L."""

    pp: int
    dp: int
    tp: int


def shapes(gpus: int) -> list[Shape]:
    """Return all shapes of so many GPUs, most GPUs per node first."""
    return [Shape(gpus // per_node, per_node) for per_node in reversed(divisors(gpus))]


def algorithm_1(
    gpus: int,
    satisfiable: Callable[[Shape], bool],
    feasible: Callable[[Shape], bool],
    model_bytes: float,
    gpu_bytes: float,
) -> list[Degrees]:
    """Parallel degrees of every shape that both filters keep: pp is the number of nodes, dp and tp lie inside a node.

    ``satisfiable`` asks the cluster (filter one); ``feasible`` prunes once more, only where several shapes are left
    (filter two). The paper leaves ``fun`` open: here tp is the smallest divisor of a node's GPUs with which a stage's
    share of the model's state fits into a GPU, and dp takes the rest; a shape with which nothing fits is left out.
    """
    kept = [shape for shape in shapes(gpus) if satisfiable(shape)]
    if len(kept) > 1:
        kept = [shape for shape in kept if feasible(shape)]
    found = []
    for shape in kept:
        stage_bytes, per_node = model_bytes / shape.nodes, shape.ranks_per_node
        tp = next((d for d in divisors(per_node) if stage_bytes / d <= gpu_bytes), None)
        if tp is not None:
            found.append(Degrees(shape.nodes, per_node // tp, tp))
    return found


def formula_3(stages_s: Sequence[float], transfers_s: Sequence[float], micro_batches: int) -> float:
    """Return the seconds of an iteration: t = Σ p_i + Σ c_(i,i+1) + (B - 1) · max p_i.

    ``stages_s``: seconds of one micro-batch on each stage; ``transfers_s``: between neighbours, one fewer. B is the
    number of micro-batches; the paper prints their size, with which this would not be the time of an iteration.
    """
    if len(transfers_s) != len(stages_s) - 1 or micro_batches < 1:
        raise ValueError(f"{len(stages_s)} stages, {len(transfers_s)} transfers, {micro_batches} micro-batches")
    return sum(stages_s) + sum(transfers_s) + (micro_batches - 1) * max(stages_s)
