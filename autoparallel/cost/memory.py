"""Peak memory of one GPU, for many layouts at once: states, activations in flight, the loss head, buffers.

In-flight micro-batches follow the schedules of arXiv:2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column, Columns
from resilio_hpc.autoparallel.base.layout import Layouts, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import expert_tp
from resilio_hpc.autoparallel.cost.activations import checkpointed, layer_activations
from resilio_hpc.autoparallel.cost.cost import Problem, stage_layers
from resilio_hpc.autoparallel.cost.offload import moves_optimizer, offloaded
from resilio_hpc.autoparallel.cost.schedule import in_flight, rounds

WORKSPACE = 0.09e9  # cuBLAS and Transformer Engine workspaces, allocated through PyTorch
CONTEXT = 1.2e9  # CUDA context and loaded kernels; seen by nvidia-smi only
CHANNELS = 0.6e9  # NCCL's buffers of one kind of process group; seen by nvidia-smi only
CACHED = 0.12  # of the allocated memory: cached by PyTorch, unused at the peak, given back before memory runs out
FRAGMENTS = 0.05  # the part of it that cannot be given back: gaps in segments in use


@dataclass(frozen=True)
class Memory(Columns):
    """Bytes that PyTorch has allocated at the peak, as columns. ``first``: of the fuller of the first two stages.

    ``states``: of the first stage. ``gaps``: cached beside these, and unusable for anything else; ``cached``: part of
    the peak that the allocator keeps unused while there is room; ``buckets``: of communication libraries. ``host``:
    what a rank keeps in the host's memory.
    """

    states: Column
    last_states: Column
    activations: Column
    head: Column
    first: Column
    last: Column
    gaps: Column
    cached: Column
    buckets: Column
    host: Column

    @property
    def peak(self) -> Column:
        return np.maximum(self.first, self.last)

    @property
    def device(self) -> Column:
        """Return nvidia-smi's reading where there is room; a plan must fit it into the GPU."""
        return (self.peak + self.gaps) * (1 + self.cached) + CONTEXT + self.buckets

    @property
    def least(self) -> Column:
        """Return the least memory to run at all, after the allocator has given back what it can."""
        return (self.peak + self.gaps) * (1 + FRAGMENTS) + CONTEXT + self.buckets

    def seen(self, capacity: Column) -> Column:
        """Return nvidia-smi's reading for a GPU of so many bytes."""
        return np.minimum(self.device, np.maximum(capacity, self.least))

    def reserved(self, capacity: Column) -> Column:
        """Return the bytes that PyTorch's allocator holds in a GPU of so many bytes."""
        return self.seen(capacity) - CONTEXT - self.buckets


@dataclass(frozen=True)
class _Activations:
    """Bytes of one stage: ``kept`` by the micro-batches in flight; ``working``: more in one layer's backward pass.

    ``host``: kept in the host's memory.
    """

    kept: Column
    working: Column
    host: Column


def _state_bytes(problem: Problem) -> tuple[Column, Column, Column, Column]:
    """Return the bytes of states per parameter that a rank holds: outside experts, and of experts.

    The last two: of those in the host's memory.
    """
    stacks, layouts = problem.stacks, problem.layouts
    zero = layouts.zero
    half_grads = stacks.grad_bytes < 4
    optimizer = np.where(half_grads, 16.0, 12.0)  # fp16 gradients are copied to fp32 before the step
    weights, grads = 2.0 * np.ones_like(optimizer), stacks.grad_bytes + 2 * stacks.both_grads
    sharded_all = np.where(stacks.fp32_weights > 0, 16.0, weights + grads + optimizer)
    whole = np.where(zero >= 3, 0.0, weights + np.where(zero >= 2, 0.0, grads))
    whole = whole * np.where(layouts.schedule == Schedule.DUALPIPE, 2, 1)  # a rank is a stage of both directions
    sharded = np.where(zero >= 3, sharded_all, np.where(zero >= 2, grads + optimizer, optimizer))
    ranks = np.where(zero >= 1, layouts.dp * layouts.cp / layouts.replicas, 1)
    alike = layouts.tp * layouts.dp * layouts.cp / (layouts.ep * expert_tp(layouts, stacks)) / layouts.replicas
    alike = np.where(zero >= 1, np.maximum(alike, 1), 1)
    moved = optimizer + np.where(zero >= 2, grads, 0.0)  # ZeRO-Offload (arXiv:2101.06840)
    moved = np.where((zero >= 3) & (stacks.fp32_weights > 0), sharded_all, moved)  # FSDP's CPUOffloadPolicy
    moved = np.where(moves_optimizer(layouts), np.minimum(moved, sharded), 0.0)
    # beside these, Megatron's and DeepSpeed's hosts hold a copy of the gradients
    on_host = moved + np.where(moves_optimizer(layouts) & (zero < 2), 4.0, 0.0)
    sharded = sharded - moved
    return whole + sharded / ranks, whole + sharded / alike, on_host / ranks, on_host / alike


def _layer_parameters(problem: Problem) -> tuple[Column, Column]:
    """Return the parameters of an average layer on one GPU before sharding: outside experts, and of experts."""
    models, layouts = problem.models, problem.layouts
    experts = models.layer_expert_parameters / (layouts.ep * expert_tp(layouts, problem.stacks))
    return models.layer_parameters / layouts.tp, experts


def _activations(problem: Problem, layers: Column, after: Column) -> _Activations:
    layouts, stacks = problem.layouts, problem.stacks
    full, stored = layer_activations(problem.models, layouts, stacks)
    some = np.where(stacks.keeps_products > 0, checkpointed(problem.models, layouts, stacks), (full + stored) / 2)
    each = np.select(
        [layouts.recompute == Recompute.FULL, layouts.recompute == Recompute.ALTERNATE], [stored, some], full
    )
    held = in_flight(after, layouts.micro_batches, layouts.pp, layouts.vpp, layouts.schedule)
    sent = np.where((stacks.keeps_outputs > 0) & (after > 0), layouts.vpp * stored, 0.0)
    # what is recomputed needs the input
    freed = np.where((stacks.frees_inputs > 0) & (layouts.recompute == Recompute.NONE), stored, 0.0)
    sent = sent - np.where(layouts.pp > 1, np.minimum(layouts.vpp, layers) * freed, 0.0)
    working = np.where(layouts.recompute == Recompute.NONE, 0.0, full)
    # of attention and MLP, where sequence parallelism has sharded them
    again = np.where((stacks.keeps_gathered > 0) & (layouts.sequence_parallel > 0), 2 * (layouts.tp - 1) * stored, 0.0)
    moved = offloaded(problem.models, layouts, stacks)
    # two layers are on the GPU: the one that is worked on, and the one that is copied
    working = working + again + np.minimum(layers * held, 2) * moved
    return _Activations(held * (layers * (each - moved) + sent), working, held * layers * moved)


def _head(problem: Problem) -> tuple[Column, Column]:
    """Return the bytes of the logits and their gradients at the peak, and of the gap that they leave."""
    models, layouts, stacks = problem.models, problem.layouts, problem.stacks
    tokens = layouts.micro_batch * models.seq / layouts.cp
    logits = tokens * models.vocab / layouts.tp
    parallel = (layouts.tp > 1) & (stacks.parallel_loss_bytes > 0)
    whole = np.where((layouts.sequence_parallel > 0) & (stacks.keeps_gathered == 0), layouts.tp, 1)
    inputs = tokens * 2 * models.hidden / whole  # of the product, behind the last norm
    return np.where(parallel, stacks.parallel_loss_bytes, stacks.loss_bytes) * logits + inputs, (
        stacks.loss_gap_bytes * logits
    )


def _group_kinds(layouts: Layouts) -> Column:
    """Return the number of kinds of process groups that communicate, plus the one of all ranks."""
    degrees = (layouts.tp, layouts.pp, layouts.dp, layouts.cp, layouts.ep)
    kinds = np.ones(1)
    for degree in degrees:
        kinds = kinds + (degree > 1)
    return kinds


def _unit(problem: Problem, layer: Column) -> Column:
    """Return the parameters that ZeRO-3 gathers at once: of a layer, or of its largest matrix."""
    models, layouts = problem.models, problem.layouts
    return np.where(problem.stacks.gather_whole > 0, models.hidden * models.ffn / layouts.tp, layer)


def _gathered(problem: Problem, layers: Column, unit: Column, ends: Column) -> Column:
    """Return the bytes that ZeRO-3 holds gathered.

    ``unit``: parameters of a layer; ``ends``: of embedding and loss head.
    """
    layouts = problem.layouts
    # with a pipeline, FSDP keeps a stage's parameters gathered and its gradients whole over all its micro-batches
    stage = (2 + problem.stacks.grad_bytes) * (layers * unit + ends)
    held = np.where(layouts.pp > 1, stage, 2 * (ends + 2 * unit))  # otherwise of one layer, and of the next one
    return np.where(layouts.zero >= 3, held, 0.0)


def _gathering(problem: Problem, unit: Column, ends: Column) -> Column:
    """Return the bytes of the buffers of ZeRO-3's gathering stream."""
    return np.where(problem.layouts.zero >= 3, 2 * np.maximum(ends, 2 * unit), 0.0)


def _collected(problem: Problem, layer: Column) -> Column:
    """Return the bytes of gradients that ZeRO-2 beside a pipeline holds whole: of the chunk in its backward passes.

    They are reduced once its micro-batches in a row are done; until then those of one more round lie there.
    """
    layouts = problem.layouts
    chunk = problem.stacks.grad_bytes * layer / layouts.vpp
    more = 1 + (rounds(layouts.micro_batches, layouts.pp) > 1)
    return np.where((layouts.zero == 2) & (layouts.pp > 1), more * chunk, 0.0)


def memory(problem: Problem) -> Memory:
    """Return the peak bytes of every row."""
    models, layouts, stacks = problem.models, problem.layouts, problem.stacks
    dense, experts = _layer_parameters(problem)
    dense_bytes, expert_bytes, dense_host, expert_host = _state_bytes(problem)
    held = stage_layers(problem)
    layer = dense * dense_bytes + experts * expert_bytes
    end = np.where((layouts.pp == 1) & (models.tied == 0), 2, 1) * models.embedding_parameters / layouts.tp
    unit = _unit(problem, dense + experts)
    at_first, at_last = (
        layers * layer + end * dense_bytes + _gathered(problem, layers, unit, end) for layers in (held.first, held.last)
    )
    head, gap = _head(problem)
    reducing = np.where(layouts.zero >= 3, (2 + stacks.grad_bytes) * unit, 0.0)
    reducing = reducing + _collected(problem, held.most * (dense + experts))
    first = _activations(problem, held.first, layouts.pp - 1)
    last = _activations(problem, held.last, 0 * layouts.pp)
    working = first.working + reducing
    fullest = at_first + first.kept + np.where(layouts.pp == 1, np.maximum(head, working), working)
    if np.any(held.most > held.first) or np.any(layouts.schedule > Schedule.GPIPE):
        # a stage in the middle has a layer in place of the embedding
        second = _activations(problem, held.most, np.maximum(layouts.pp - 2, 0))
        fuller = held.most * layer + _gathered(problem, held.most, unit, 0 * end) + second.kept + working
        fullest = np.where(layouts.pp > 2, np.maximum(fullest, fuller), fullest)
    on_host = held.most * (dense * dense_host + experts * expert_host) + end * dense_host
    return Memory(
        host=on_host + np.maximum(first.host, last.host),
        states=at_first,
        last_states=at_last,
        activations=np.maximum(first.kept + working, last.kept),
        head=head,
        first=WORKSPACE + fullest,
        last=WORKSPACE + at_last + last.kept + np.maximum(head, working),
        gaps=_gathering(problem, unit, end) + np.where(layouts.pp == 1, gap, 0.0),
        cached=np.where((stacks.expandable > 0) | (stacks.avoids_record_streams > 0), FRAGMENTS, CACHED)
        * np.ones_like(at_first),
        buckets=stacks.buckets * (stacks.grad_bytes + 2) + CHANNELS * _group_kinds(layouts) * np.ones_like(at_first),
    )
