"""Time and memory of a traced model's layouts: data parallel with ZeRO, pipeline stages between its operators. Pure.

Stages differ, so arrays have a row for each layout and a column for each stage. Schedules, collectives, overlaps,
optimizer, and what surrounds an iteration are those of the cost model for transformers (``cost.py``, ``memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.cost.collectives import Groups, all_reduce, gather, groups, transfer
from resilio_hpc.autoparallel.cost.cost import norm
from resilio_hpc.autoparallel.cost.memory import CACHED, CHANNELS, CONTEXT, FRAGMENTS, WORKSPACE
from resilio_hpc.autoparallel.cost.operator_times import OperatorSeconds
from resilio_hpc.autoparallel.cost.schedule import StageSeconds, in_flight, pipeline_time
from resilio_hpc.autoparallel.model.operators import optimizer_time
from resilio_hpc.autoparallel.model.traced_model import TracedModel

Stages = NDArray[np.float64]
"""One value per stage (stages,), or per layout and stage (layouts, stages)."""


@dataclass(frozen=True)
class StageHoldings:
    """Of each stage: parameters and their bytes; of the traced micro-batch what it receives, keeps and writes.

    ``outside``: kept outside of repeated blocks; ``inputs``: what its blocks start from; ``block``: kept by the largest
    of them; ``unit``: the bytes of the largest block's parameters.
    """

    counts: Stages
    sizes: Stages
    received: Stages
    saved: Stages
    outside: Stages
    inputs: Stages
    block: Stages
    unit: Stages
    largest: Stages


@dataclass(frozen=True)
class StageTimes:
    """Of each stage, seconds of one micro-batch: forward, backward, forward of repeated blocks, the host's launches."""

    forward: Stages
    backward: Stages
    blocks: Stages
    host: Stages


@dataclass(frozen=True)
class TracedCosts:
    """Seconds of an iteration, and its parts; ``memory``: bytes of the fullest GPU, as nvidia-smi reads them.

    Shape (layouts,).
    """

    iteration: NDArray[np.float64]
    bubble: NDArray[np.float64]
    communication: NDArray[np.float64]
    memory: NDArray[np.float64]


@dataclass(frozen=True)
class TracedSetting:
    """A model on one kind of GPU in its nodes, with the software that trains it."""

    model: TracedModel
    machine: Machine
    stack: Stack
    efficiency: Efficiency


def holdings(model: TracedModel, starts: Sequence[int]) -> StageHoldings:
    """Return what stages hold. ``starts``: the first operator of each. A parameter is held by each stage that uses it.

    Parameters without a reader stay on the first stage.
    """
    graph, firsts = model.graph, np.array(starts)
    ends = [*starts[1:], len(graph.operators)]
    held = [graph.parameters_of(first, end) for first, end in zip(starts, ends, strict=True)]
    held[0] |= set(range(len(graph.parameters))) - set[int]().union(*held)
    counts, sizes = (
        np.array([float(sum(one[index] for index in some)) for some in held])
        for one in ([p.count for p in graph.parameters], [p.size_bytes for p in graph.parameters])
    )
    blocks, inside = np.flatnonzero(graph.block_starts), model.in_blocks
    kept, unit = np.zeros(len(graph.operators)), np.zeros(len(graph.operators))
    kept[blocks] = np.add.reduceat(np.where(inside, model.saved_bytes, 0), blocks)
    unit[blocks] = np.add.reduceat(graph.parameter_bytes, blocks)

    def total(values: NDArray[np.int64]) -> Stages:
        return np.add.reduceat(values.astype(float), firsts)

    received = graph.cut_bytes[firsts].astype(float)
    received[0] = 0.0
    return StageHoldings(
        counts, sizes, received, total(model.saved_bytes), total(np.where(inside, 0, model.saved_bytes)),
        total(np.where(graph.block_starts & inside, graph.cut_bytes, 0)), np.maximum.reduceat(kept, firsts),
        np.maximum.reduceat(unit, firsts), np.maximum.reduceat(graph.made_bytes.astype(float), firsts),
    )  # fmt: skip


def stage_sums(model: TracedModel, starts: Sequence[int], times: OperatorSeconds) -> StageTimes:
    """Return the times of stages."""
    blocks = np.where(model.in_blocks, times.forward, 0.0)
    every = (times.forward, times.backward, blocks, times.host)
    return StageTimes(*(np.add.reduceat(one, np.array(starts)) for one in every))


def traced_costs(
    asked: TracedSetting, layouts: Sequence[Layout], held: StageHoldings, times: Sequence[StageTimes]
) -> TracedCosts:
    """Return the costs of layouts that differ in micro-batch, ZeRO and recomputation. ``times``: of each."""
    rows = Layouts.of(layouts)
    return TracedCosts(*_seconds(asked, layouts[0], rows, held, times), _memory(asked, layouts[0], rows, held))


# -- time --------------------------------------------------------------------------------------------------------------


def _seconds(
    asked: TracedSetting, one: Layout, rows: Layouts, held: StageHoldings, times: Sequence[StageTimes]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return seconds of the iteration, of its bubble, and of moving data. ``one``: a layout, for what they share."""
    machines, known = Machines.of([asked.machine]), asked.efficiency
    group = groups(Layouts.of([one]), machines, np.ones(1))
    count, full = rows.micro_batches[:, None], (rows.recompute == Recompute.FULL)[:, None]
    forward, backward, blocks, host = (
        np.stack([getattr(some, name) for some in times]) for name in ("forward", "backward", "blocks", "host")
    )
    bandwidth = machines.memory_bandwidth * known.memory
    computed = forward + backward + np.where(full, blocks, 0.0)
    device = computed + _accumulated_bytes(asked.stack, one.dp, rows, held) / bandwidth
    host[:, -1] += known.host_micro_us * 1e-6
    running = norm(device, host, known.host_norm)
    stage = norm(running, _sharding(rows, held, group, machines, known), known.fsdp_norm)
    sent = held.received * rows.micro_batch[:, None] / asked.model.samples
    received = np.where(sent > 0, 2 * transfer(sent, group.stage_is_local, machines, known), 0.0)
    busy = stage + np.maximum(received, np.pad(received[:, 1:], ((0, 0), (0, 1))))
    slowest = busy.max(1)
    total = np.maximum(stage.sum(1) + received.sum(1), slowest)
    both = StageSeconds(slowest, total, forward.sum(1) / computed.sum(1), np.zeros(1))
    pipeline = pipeline_time(both, count[:, 0], rows.pp, rows.vpp, rows.schedule)
    exposed = _gradients(asked, one.dp, rows, held, stage, group, machines).max(1)
    waiting = 1 + known.straggler * np.log2(max(one.num_gpus / asked.machine.node_gpus, 1.0))
    optimizer = optimizer_time(held.counts.max(keepdims=True), rows, machines, known)
    time = (pipeline + exposed) * waiting + optimizer + known.host_step_us * 1e-6
    slow = busy.argmax(1)[:, None]
    moving = count * (np.take_along_axis(busy, slow, 1) - np.take_along_axis(running, slow, 1))
    return time, pipeline - count[:, 0] * slowest, moving[:, 0] + exposed


def _accumulated_bytes(stack: Stack, dp: int, rows: Layouts, held: StageHoldings) -> Stages:
    """Return the bytes to add one micro-batch's gradients to those of the others, as ``operators._accumulation``."""
    zero, several = rows.zero[:, None], rows.micro_batches[:, None] > 1
    apart = several & ~(np.array(stack.adds_in_product) & (zero < 3))
    added = np.where(apart, held.counts * (2 * stack.grad_bytes + 2), 0.0)
    return np.where(zero >= 3, added / dp + held.counts * (6 + stack.grad_bytes), added)


def _sharding(rows: Layouts, held: StageHoldings, group: Groups, machines: Machines, known: Efficiency) -> Stages:
    """Return the seconds of ZeRO-3's gathers and scatters per micro-batch, as ``cost._sharding``."""
    once = gather(held.sizes, group.shard, machines, known)
    times = np.where(rows.pp > 1, 2 / rows.micro_batches, 3.0)[:, None]
    return np.where(rows.zero[:, None] >= 3, times * once, 0.0)


def _gradients(
    asked: TracedSetting, dp: int, rows: Layouts, held: StageHoldings, stage: Stages, group: Groups, machines: Machines
) -> Stages:
    """Return the seconds of each stage's reduction of gradients, as far as they show, as ``cost._gradients``."""
    known, stack, zero = asked.efficiency, asked.stack, rows.zero[:, None]
    size = held.counts * max(stack.grad_bytes, asked.model.element_bytes)
    apart = gather(size, group.dp, machines, known) + gather(held.sizes, group.dp, machines, known)
    whole = np.where(zero >= 1, apart, all_reduce(size, group.dp, machines, known))
    behind = 0.6 * known.dp_overlap * stage if stack.overlap_dp else 0.0
    return np.where((zero >= 3) | (dp == 1), 0.0, np.maximum(whole - behind, 0.1 * whole))


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(asked: TracedSetting, one: Layout, rows: Layouts, held: StageHoldings) -> NDArray[np.float64]:
    stack, full = asked.stack, (rows.recompute == Recompute.FULL)[:, None]
    scale = rows.micro_batch[:, None] / asked.model.samples
    after = np.arange(held.counts.size)[::-1].astype(float)
    order = np.array([float(Schedule.ONE_F_ONE_B)])
    running = in_flight(after, rows.micro_batches[:, None], rows.pp[:, None], np.ones(1), order)
    saved = scale * np.where(full, held.outside + held.inputs, held.saved)
    working = scale * (2 * held.largest + np.where(full, held.block, 0.0))  # a value's gradient, and what becomes of it
    states = held.counts * _state_bytes(rows, asked.model.element_bytes, stack)[:, None]
    # ZeRO-3 gathers the largest block and the next one; beside a pipeline all stay gathered, and gradients whole
    gathered = np.where(rows.pp[:, None] > 1, 2 * held.sizes, 2 * held.unit)
    peak = WORKSPACE + states + np.where(rows.zero[:, None] >= 3, gathered, 0.0) + running * saved + working
    cached = FRAGMENTS if stack.expandable or stack.avoids_record_streams else CACHED
    buckets = stack.buckets * (stack.grad_bytes + 2) + CHANNELS * (1 + (one.dp > 1) + (one.pp > 1))
    return np.asarray(peak.max(1) * (1 + cached) + CONTEXT + buckets)


def _state_bytes(rows: Layouts, element: int, stack: Stack) -> NDArray[np.float64]:
    """Return the bytes per parameter of weights, gradients and Adam on one GPU, as ``memory._state_bytes``.

    Weights in fp32 need no second copy of themselves.
    """
    weights, grads, optimizer = 4.0, 4.0, 8.0
    if element < 4:
        weights, grads = 2.0, float(stack.grad_bytes + 2 * stack.both_grads)
        optimizer = 16.0 if stack.grad_bytes < 4 else 12.0
    every = 16.0 if stack.fp32_weights and element < 4 else weights + grads + optimizer
    ranks, zero = np.where(rows.zero >= 1, rows.dp, 1.0), rows.zero
    whole = weights + np.where(zero >= 2, 0.0, grads)
    sharded = optimizer + np.where(zero >= 2, grads, 0.0)
    return np.where(zero >= 3, every / ranks, whole + sharded / ranks)
