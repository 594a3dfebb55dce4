"""One layout in detail: its pipeline pass by pass, the parts of an iteration, the memory of every stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.cost.memory import WORKSPACE, Memory, memory
from resilio_hpc.autoparallel.cost.schedule import Pass, in_flight, interleaved_order, one_f_one_b_order, simulate
from resilio_hpc.autoparallel.cost.stage_times import layers_of, stage_times
from resilio_hpc.autoparallel.measure.nearby import costed
from resilio_hpc.autoparallel.measure.predict import half_width
from resilio_hpc.autoparallel.model.transformer import Transformers
from resilio_hpc.autoparallel.search.ranking import Training, peak_flops
from resilio_hpc.core.errors import UsageError

# of a micro-batch's time, the forward pass: backward is twice as long, and recomputes what was not kept
_FORWARD = {Recompute.NONE: 1 / 3, Recompute.SELECTIVE: 1 / 3, Recompute.FULL: 1 / 4, Recompute.ALTERNATE: 1 / 3.5}
MOST_STAGES = 128


@dataclass(frozen=True)
class StageMemory:
    """Bytes at the peak of one stage's GPUs. ``other``: outside of PyTorch: CUDA, NCCL, fragments, buckets."""

    layers: int
    states: float
    activations: float
    head: float
    other: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.head + self.other


@dataclass(frozen=True)
class Explained:
    """An explained layout. ``parts``: seconds of an iteration by name; they overlap, so their sum may be more.

    ``passes``: of the first ``drawn`` micro-batches of ``micro_batches``; ``after_s``: reduction of gradients and
    optimizer behind them.
    """

    layout: Layout
    iteration_s: float
    low_s: float
    high_s: float
    mfu: float
    parts: Mapping[str, float]
    passes: tuple[Pass, ...]
    drawn: int
    after_s: float
    stages: tuple[StageMemory, ...]
    gpu_bytes: float


def check(training: Training, layout: Layout, machine: Machine) -> None:
    """Raise UsageError for a layout that is impossible for this model."""
    model = training.model
    for wrong, why in (
        (layout.pp > MOST_STAGES, f"pp {layout.pp}: at most {MOST_STAGES} stages can be drawn"),
        (layout.pp * layout.vpp > model.layers + 2 * (layout.vpp > 1),  # embedding and head may be chunks of their own
         f"pp x vpp = {layout.pp * layout.vpp} of {model.layers} layers"),
        (model.heads % layout.tp, f"tp {layout.tp} does not divide {model.heads} attention heads"),
        (layout.tp > machine.domain_gpus, f"tp {layout.tp} is more than {machine.domain_gpus} GPUs that share NVLink"),
        (layout.global_batch % (layout.dp * layout.micro_batch),
         f"a global batch of {layout.global_batch} cannot be split over dp {layout.dp} in micro-batches of "
         f"{layout.micro_batch}"),
        (layout.vpp > 1 and layout.micro_batches % layout.rounds,
         f"vpp {layout.vpp}: {layout.micro_batches} micro-batches are no multiple of {layout.rounds} rounds of "
         f"{layout.pp} stages"),
        (layout.etp and layout.tp % layout.etp, f"etp {layout.etp} does not divide tp {layout.tp}"),
        (layout.etp and layout.tp * layout.dp * layout.cp % (layout.ep * layout.etp),
         f"ep x etp = {layout.ep * layout.etp} does not divide tp x dp x cp"),
        (layout.head_layers and min(layers_of(model.layers, layout.pp, layout.head_layers)) < 0,
         f"head {layout.head_layers} leaves the last of {layout.pp} stages less than nothing"),
        (layout.ep > 1 and (not model.experts or model.experts % layout.ep),
         f"ep {layout.ep} does not divide {model.experts} experts"),
    ):  # fmt: skip
        if wrong:
            raise UsageError(f"layout {layout}: {why}")


def explain(training: Training, layout: Layout, machine: Machine) -> Explained:
    """Explain a layout, also one that does not fit into the GPU. Raises UsageError for an impossible one."""
    check(training, layout, machine)
    asked = Problem(
        Transformers.of([training.model]), Layouts.of([layout]), Machines.of([machine]), Stacks.of([training.stack])
    )
    efficiency = training.efficiency_on(machine)
    cost = costed(asked, efficiency, training.nearby).full(1)
    time = float(cost.iteration[0])
    spread = float(np.exp(np.ravel(half_width(asked, cost, training.calibrated))[0]))
    tokens = layout.global_batch * training.model.seq / layout.num_gpus
    mfu = float(asked.models.flops_per_token[0]) * tokens / time / peak_flops(machine, training.stack)
    passes, drawn = _passes(efficiency, asked, cost, layout)
    parts = {field.name: float(getattr(cost, field.name)[0]) for field in fields(Cost) if field.name != "iteration"}
    return Explained(
        layout, time, time / spread, time * spread, mfu, parts, passes, drawn,
        float(cost.data_parallel[0] + cost.optimizer[0]), _stages(memory(asked), layout, training.model.layers),
        machine.memory_gb * 1e9,
    )  # fmt: skip


def _passes(efficiency: Efficiency, asked: Problem, cost: Cost, layout: Layout) -> tuple[tuple[Pass, ...], int]:
    """Return the schedule, as far as it is worth drawing: filling, some rounds of the steady state, draining."""
    host = float(cost.host[0])
    times, transfers = stage_times(cost, asked, layout, efficiency, host)
    transfer = transfers[0] if transfers else 0.0
    share = _FORWARD[layout.recompute]
    count = layout.micro_batches
    drawn = min(count, max(2 * layout.pp, 8))
    if layout.vpp > 1:
        drawn = count // layout.rounds * min(layout.rounds, 2)
        orders = [interleaved_order(stage, layout.pp, drawn, layout.vpp) for stage in range(layout.pp)]
    else:
        orders = [one_f_one_b_order(stage, layout.pp, drawn) for stage in range(layout.pp)]
    each = [time / layout.vpp + transfer for time in times]
    passes = simulate(orders, [time * share for time in each], [time * (1 - share) for time in each])
    return tuple(passes), drawn


def _stages(held: Memory, layout: Layout, layers: int) -> tuple[StageMemory, ...]:
    """Return the memory of the stages between first and last, by the micro-batches in flight on each."""
    states, at_last, head = _first(held.states), _first(held.last_states), _first(held.head)
    ends = _first(held.first), _first(held.last)
    first = ends[0] - states - WORKSPACE - (head if layout.pp == 1 else 0.0)
    last = ends[1] - at_last - WORKSPACE - head
    other = _first(held.device) - max(ends)  # of the fullest stage; a little too much for the others
    after = np.arange(layout.pp - 1, -1, -1.0)
    rest = (np.array([float(value)]) for value in (layout.micro_batches, layout.pp, layout.vpp, layout.schedule))
    flight = [float(value) for value in np.broadcast_to(in_flight(after, *rest), after.shape)]
    step = (first - last) / (flight[0] - flight[-1]) if flight[0] > flight[-1] else 0.0
    return tuple(
        StageMemory(
            held_layers, (at_last if stage == layout.pp - 1 else states) + WORKSPACE,
            last + step * (flight[stage] - flight[-1]),
            head if stage == layout.pp - 1 else 0.0, other,
        )
        for stage, held_layers in enumerate(layers_of(layers, layout.pp, layout.head_layers))
    )  # fmt: skip


def _first(column: object) -> float:
    return float(np.ravel(np.asarray(column))[0])
