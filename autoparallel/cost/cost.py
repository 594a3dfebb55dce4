"""Time of one training iteration, for many layouts at once: operators, collectives, pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column, Columns
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layouts, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import Stacks, expert_tp
from resilio_hpc.autoparallel.cost.collectives import (
    CollectiveGroup,
    Groups,
    all_reduce,
    all_to_all,
    gather,
    groups,
    transfer,
)
from resilio_hpc.autoparallel.cost.offload import (
    copies_time,
    moves_optimizer,
    offloaded,
    optimizer_on_host_time,
)
from resilio_hpc.autoparallel.cost.schedule import StageSeconds, pipeline_time, rounds
from resilio_hpc.autoparallel.model import operators
from resilio_hpc.autoparallel.model.operators import Work
from resilio_hpc.autoparallel.model.transformer import Transformers


@dataclass(frozen=True)
class Problem:
    """The input of the cost model: models, layouts, machines and software as columns of one length, or of length 1."""

    models: Transformers
    layouts: Layouts
    machines: Machines
    stacks: Stacks


@dataclass(frozen=True)
class Cost(Columns):
    """Seconds per iteration and their parts, as columns. ``bubble``: idle time of the slowest stage's GPUs.

    ``offload``: copies of activations to the host and back, as far as computing does not hide them.
    """

    iteration: Column
    compute: Column
    tensor_parallel: Column
    expert_parallel: Column
    context_parallel: Column
    pipeline_transfers: Column
    bubble: Column
    data_parallel: Column
    optimizer: Column
    host: Column
    offload: Column


def norm(first: Column, second: Column, power: float) -> Column:
    """Return the time of two things that overlap: from the longer one (large power) to their sum (power 1)."""
    largest = np.maximum(np.maximum(first, second), 1e-12)
    return largest * ((first / largest) ** power + (second / largest) ** power) ** (1 / power)


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and one micro-batch on one GPU, forward and backward together."""

    compute: Column
    tensor_parallel: Column
    expert_parallel: Column
    context_parallel: Column
    sharding: Column
    copies: Column
    total: Column


def _communication(problem: Problem, group: Groups, efficiency: Efficiency) -> tuple[Column, Column, Column]:
    """Tensor-, expert- and context-parallel seconds of one layer, forward and backward, recomputation included."""
    models, layouts, machines = problem.models, problem.layouts, problem.machines
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole_layers = np.where(problem.stacks.fine_recompute > 0, 0.0, 0.5)
    again = (layouts.recompute == Recompute.FULL) + (layouts.recompute == Recompute.ALTERNATE) * whole_layers
    activations = tokens * models.hidden * 2
    exposed = 1 - efficiency.tp_overlap * problem.stacks.overlap_tp / 2
    # two all-reduces per pass; with sequence parallelism a gather and a scatter replace each
    reduced = all_reduce(activations, group.tp, machines, efficiency)
    spread = 2 * gather(activations, group.tp, machines, efficiency)
    tensor = (2 + again) * 2 * np.where(layouts.sequence_parallel > 0, spread, reduced)
    routed = activations * models.topk / np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    routed = routed * np.where(problem.stacks.fp8_dispatch > 0, 0.75, 1.0)
    once = problem.stacks.dispatch_once > 0
    inner = routed * np.where(once, _distinct(models.topk, group.ep.size), 1.0)
    places = group.ep.size / group.ep.local
    places = np.where(models.route_nodes > 0, np.minimum(places, models.route_nodes), places)
    outer = routed * np.where(once, _distinct(models.topk, places), 1.0)
    exchange = all_to_all(inner, outer, group.ep, machines, efficiency)
    # ranks that share an expert gather each other's tokens, and sum their parts of the results
    inside = gather(routed * group.etp.size, group.etp, machines, efficiency)
    expert = (2 + again) * 2 * models.moe_share * (exchange + inside)
    keys = 2 * tokens * layouts.cp * 2 * models.kv_heads * models.head_dim / layouts.tp
    context = (1.5 + again / 2) * 2 * gather(keys, group.cp, machines, efficiency)
    beside = (layouts.vpp > 1) | (layouts.schedule == Schedule.DUALPIPE)  # another micro-batch's compute
    # inside of an NVLink domain the processors that compute make the copies, too
    outside = group.ep.size > group.ep.local
    hidden = efficiency.ep_overlap * problem.stacks.overlap_ep * beside * outside
    return tensor * exposed, expert * (1 - hidden), context


def _distinct(topk: Column, places: Column) -> Column:
    """Return the share of a token's copies that is left when it goes once to each place with one of its experts."""
    places = np.maximum(places, 1)
    return places * (1 - (1 - 1 / places) ** np.maximum(topk, 1)) / np.maximum(topk, 1)


def _sharding(problem: Problem, group: Groups, efficiency: Efficiency) -> Column:
    """Return the seconds per layer and micro-batch to gather parameters twice and scatter gradients once (ZeRO-3).

    Beside a pipeline, parameters stay gathered and gradients unreduced until the last micro-batch (torchtitan).
    """
    models, layouts = problem.models, problem.layouts
    experts = models.layer_expert_parameters / layouts.ep
    size = (models.layer_parameters + experts) / layouts.tp * 2
    once = gather(size, group.shard, problem.machines, efficiency)
    across = group.shard.size > group.shard.local
    slow = np.where((problem.stacks.gather_whole > 0) & across, efficiency.zero3_rails, 1.0)
    times = np.where(layouts.pp > 1, 2 / layouts.micro_batches, 3.0)
    # HSDP: the shards' gradients are then summed over the replicas, on a stream of their own and over other links
    shard = size / 2 * problem.stacks.grad_bytes / group.shard.size
    summed = all_reduce(shard, group.replicas, problem.machines, efficiency)
    summed = np.where(layouts.pp > 1, summed / layouts.micro_batches, summed)
    return np.where(layouts.zero >= 3, np.maximum(times * once / slow, summed), 0.0)


def _layer(problem: Problem, work: Work, group: Groups, efficiency: Efficiency) -> _Layer:
    tensor, expert, context = _communication(problem, group, efficiency)
    sharding = _sharding(problem, group, efficiency)
    # a collective starts when the last of its ranks has launched it, so slow launches do not hide it
    moving = tensor + expert + context
    models = problem.models
    # in the forward pass the host reads how many tokens each expert gets before it launches their products: the device
    # waits for these launches
    waits = models.moe_share * ~operators.captured(models, problem.machines, problem.stacks)
    device = norm(work.layer, work.host, efficiency.host_norm) + waits * work.host / 3 + moving
    total = norm(device, sharding, efficiency.fsdp_norm)
    copies = copies_time(offloaded(models, problem.layouts, problem.stacks), problem.machines, total, work.forward)
    return _Layer(work.layer, tensor, expert, context, total - device, copies, total + copies)


def _gradients(
    problem: Problem, group: Groups, efficiency: Efficiency, layers: Column, layer: _Layer, forward: Column
) -> Column:
    """Seconds of one stage's reduction of gradients and gathering of parameters (ZeRO-1), as far as they show.

    Where the software overlaps, gradients are reduced behind the last backward pass; with ``overlap_dp`` 2 parameters
    are gathered behind the first forward pass, and of either what a layer moves is left at the end.
    """
    models, layouts, stacks = problem.models, problem.layouts, problem.stacks
    dense, experts = held_parameters(problem)
    machines = problem.machines

    def times(held: Column, ranks: CollectiveGroup) -> tuple[Column, Column, Column]:
        size = held * stacks.grad_bytes
        gathering = gather(held * 2.0, ranks, machines, efficiency)
        return gather(size, ranks, machines, efficiency), gathering, all_reduce(size, ranks, machines, efficiency)

    scatter, gathering, reduced = times(dense, group.dp)
    if np.any(experts > 0):
        some = [np.where(experts > 0, time, 0.0) for time in times(experts, group.alike)]
        scatter, gathering, reduced = scatter + some[0], gathering + some[1], reduced + some[2]
    whole = np.where(layouts.zero >= 1, scatter + gathering, reduced)
    behind = efficiency.dp_overlap * layers * layer.total
    once = np.maximum(whole - np.where(stacks.overlap_dp > 0, 0.6 * behind, 0.0), 0.1 * whole)
    last = 1 / np.maximum(layers, 1)
    # ZeRO-2 beside a pipeline reduces a chunk's gradients in each round, behind the next chunk's backward passes
    apart = np.where((layouts.zero == 2) & (layouts.pp > 1), rounds(layouts.micro_batches, layouts.pp), 1)
    beside = (1 - forward) * behind * layouts.micro_batches / apart
    earlier = (apart - 1) * np.maximum(scatter - beside, 0.0)
    parts = earlier + np.maximum(scatter - (1 - forward) * behind, last * scatter)
    parts = parts + np.maximum(gathering - forward * behind, last * gathering)
    exposed = np.where((stacks.overlap_dp > 1) & (layouts.zero >= 1), parts, once)
    return np.where((layouts.zero >= 3) | (models.hidden == 0), 0.0, exposed)


@dataclass(frozen=True)
class StageLayers:
    """Layers of pipeline stages: the fullest in the middle, the first and the last one."""

    most: Column
    first: Column
    last: Column


def stage_layers(problem: Problem) -> StageLayers:
    """Return how layers are spread: evenly; where that leaves a remainder, the ends have fewer.

    They hold embedding and loss head: "type:transformer|embedding" of DeepSpeed,
    --account-for-embedding-in-pipeline-split and --pipeline-model-parallel-layout of Megatron-Core,
    first_stage_less_layers of torchtitan, the 126 layers of Llama 3 (arXiv:2407.21783). A layout may say how many
    layers the loss head counts as (``head_layers``): the last stage has so many fewer.
    """
    layers, pp, head = problem.models.layers + problem.models.mtp, problem.layouts.pp, problem.layouts.head_layers
    most = np.ceil((layers + head) / pp)
    missing = most * pp - layers - head
    return StageLayers(most, most - ((missing > 1) & (pp > 1)), most - head - ((missing > 0) & (pp > 1)))


def held_parameters(problem: Problem) -> tuple[Column, Column]:
    """Return the parameters of the fullest pipeline stage on one GPU before sharding: outside experts, and of them."""
    models, layouts = problem.models, problem.layouts
    held = stage_layers(problem)
    embeddings = np.where(layouts.pp > 1, 1, np.where(models.tied > 0, 1, 2)) * models.embedding_parameters
    dense = np.maximum(held.most * models.layer_parameters, held.first * models.layer_parameters + embeddings)
    split = layouts.ep * expert_tp(layouts, problem.stacks)
    return dense / layouts.tp, held.most * models.layer_expert_parameters / split


def _transfers(problem: Problem, size: Column, group: Groups, stage: Column, efficiency: Efficiency) -> Column:
    """Return the seconds of one micro-batch's transfers from one stage to the next and back, as far as they show.

    With an interleaved pipeline, what a chunk sends moves while the stage works on another one.
    """
    layouts = problem.layouts
    once = transfer(size, group.stage_is_local, problem.machines, efficiency)
    beside = np.where(problem.stacks.overlap_p2p * (layouts.vpp > 1), stage / layouts.vpp / 2, 0.0)
    return 2 * layouts.vpp * np.maximum(once - beside, 0.0)


def iteration(problem: Problem, efficiency: Efficiency) -> Cost:
    """Return the seconds of one iteration of every row."""
    models, layouts, machines, stacks = problem.models, problem.layouts, problem.machines, problem.stacks
    group = groups(layouts, machines, expert_tp(layouts, stacks))
    work = operators.work(models, layouts, machines, stacks, efficiency)
    layer = _layer(problem, work, group, efficiency)
    held = stage_layers(problem)
    layers, last = held.most, held.last
    pieces = np.where(stacks.scatter_p2p > 0, layouts.tp, 1)
    size = layouts.micro_batch * models.seq / layouts.cp * models.hidden * 2 / pieces
    step = np.where(layouts.pp > 1, _transfers(problem, size, group, layers * layer.total, efficiency), 0.0)
    micro = efficiency.host_micro_us * 1e-6
    head = norm(work.head, np.array([micro]), 4.0) * (1 + models.mtp)
    slowest = np.maximum(layers * layer.total, last * layer.total + head) + step
    total = (models.layers + models.mtp) * layer.total + layouts.pp * step + head
    count = layouts.micro_batches
    stage = StageSeconds(slowest, np.maximum(total, slowest), work.forward, work.weights)
    pipeline = pipeline_time(stage, count, layouts.pp, layouts.vpp, layouts.schedule)
    exposed = _gradients(problem, group, efficiency, layers, layer, work.forward)
    parameters = np.add(*held_parameters(problem))
    optimizer = operators.optimizer_time(parameters, layouts, machines, efficiency)
    on_host = optimizer_on_host_time(parameters, layouts, machines, stacks)
    optimizer = np.where(moves_optimizer(layouts), np.maximum(on_host, optimizer), optimizer)
    fixed = efficiency.host_step_us * 1e-6
    nodes = np.maximum(layouts.num_gpus / machines.node_gpus, 1)
    waiting = 1 + efficiency.straggler * np.log2(nodes)
    time = (pipeline + exposed) * waiting + optimizer + fixed
    return Cost(
        iteration=time,
        compute=count * (layers * layer.compute + work.head),
        tensor_parallel=count * layers * layer.tensor_parallel,
        expert_parallel=count * layers * layer.expert_parallel,
        context_parallel=count * layers * layer.context_parallel,
        pipeline_transfers=count * step,
        bubble=pipeline - count * slowest,
        data_parallel=exposed + count * layers * layer.sharding,
        optimizer=optimizer,
        host=count
        * (
            layers
            * (
                layer.total
                - layer.compute
                - layer.tensor_parallel
                - layer.expert_parallel
                - layer.context_parallel
                - layer.sharding
                - layer.copies
            )
        )
        + fixed,
        offload=count * layers * layer.copies,
    )
