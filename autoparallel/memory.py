"""Peak memory of one GPU, for many layouts at once: states, activations in flight, the loss head, buffers.

Activations follow Korthikanti et al. (arXiv:2205.05198), extended to grouped queries, gated MLPs and experts; in-flight
micro-batches follow the schedules of arXiv:2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.cost import Problem, stage_layers
from resilio_hpc.autoparallel.layout import Column, Layouts, Recompute

WORKSPACE = 0.09e9  # cuBLAS and Transformer Engine workspaces, allocated through PyTorch
BUCKETS = 2.5  # bytes per parameter of the largest unit that ZeRO-3 holds gathered, times units ahead
CONTEXT = 1.2e9  # CUDA context and loaded kernels; seen by nvidia-smi only
CHANNELS = 0.6e9  # NCCL's buffers of one kind of process group; seen by nvidia-smi only
FRAGMENTS = 0.12  # of what is allocated: cached by PyTorch and in no use, at the peak


@dataclass(frozen=True)
class Memory:
    """Bytes that PyTorch has allocated at the peak, as columns. ``first``: of the fuller of the first two stages."""

    states: Column
    activations: Column
    head: Column
    first: Column
    last: Column
    buckets: Column

    @property
    def peak(self) -> Column:
        return np.maximum(self.first, self.last)

    @property
    def device(self) -> Column:
        """What nvidia-smi shows, and what has to fit into the GPU."""
        return self.peak * (1 + FRAGMENTS) + CONTEXT + self.buckets


def _state_bytes(problem: Problem) -> tuple[Column, Column]:
    """Bytes per parameter: on every rank, and sharded from ZeRO-1 on (master weights, moments)."""
    stacks, zero = problem.stacks, problem.layouts.zero
    replicas = problem.layouts.dp * problem.layouts.cp
    half_grads = stacks.grad_bytes < 4
    optimizer = np.where(half_grads, 16.0, 12.0)  # fp16 gradients are copied to fp32 before the step
    weights, grads = 2.0 * np.ones_like(optimizer), stacks.grad_bytes + 2 * stacks.both_grads
    sharded_all = np.where(stacks.fp32_weights > 0, 16.0, weights + grads + optimizer)
    whole = np.where(zero >= 3, 0.0, weights + np.where(zero >= 2, 0.0, grads))
    spread = np.where(zero >= 3, sharded_all, np.where(zero >= 2, grads + optimizer, optimizer))
    return whole, spread / np.where(zero >= 1, replicas, 1)


def _layer_activations(problem: Problem) -> tuple[Column, Column]:
    """Bytes of one layer and micro-batch: all that backward needs, and the layer's input alone."""
    models, layouts, stacks = problem.models, problem.layouts, problem.stacks
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    moe = models.moe_share
    masks = 2.0 * (stacks.flash == 0)
    inputs = (8 + masks) * models.hidden / whole
    attention = 2 * (models.qkv_width + models.attention_width) / layouts.tp
    width = (1 - moe) * models.ffn + moe * (models.topk * models.expert_ffn + models.shared_ffn)
    mlp = 2 * (models.matrices + 1) * width / layouts.tp + moe * models.topk * 4 * models.hidden / layouts.tp
    scores = np.where(stacks.flash > 0, 0.0, 5 * models.heads * models.seen_keys / layouts.tp)
    scores = np.where(layouts.recompute == Recompute.SELECTIVE, 0.0, scores)
    return tokens * (inputs + attention + mlp + scores), tokens * 2 * models.hidden / whole


def _in_flight(problem: Problem, after: Column) -> Column:
    """Micro-batches whose activations a stage with so many after it holds at once, in units of all its layers."""
    layouts = problem.layouts
    vpp = layouts.vpp
    chunks = 2 * after + (vpp - 1) * layouts.pp + 1
    held = np.where(vpp > 1, np.minimum(chunks, layouts.micro_batches * vpp) / vpp, after + 1)
    return np.minimum(held, layouts.micro_batches)


def _activations(problem: Problem, layers: Column, after: Column) -> Column:
    layouts = problem.layouts
    full, stored = _layer_activations(problem)
    mixed = (full + stored) / 2
    each = np.select(
        [layouts.recompute == Recompute.FULL, layouts.recompute == Recompute.ALTERNATE], [stored, mixed], full
    )
    working = np.where(layouts.recompute == Recompute.NONE, 0.0, full)
    return _in_flight(problem, after) * layers * each + working


def _group_kinds(layouts: Layouts) -> Column:
    """Kinds of process groups that communicate, and the one of all ranks."""
    degrees = (layouts.tp, layouts.pp, layouts.dp, layouts.cp, layouts.ep)
    kinds = np.ones(1)
    for degree in degrees:
        kinds = kinds + (degree > 1)
    return kinds


def memory(problem: Problem) -> Memory:
    """Peak bytes of every row."""
    models, layouts, stacks = problem.models, problem.layouts, problem.stacks
    whole, spread = _state_bytes(problem)
    most, layers = stage_layers(problem)
    expert_spread = spread * np.where(layouts.zero >= 1, layouts.ep / layouts.tp, 1).clip(min=1)
    experts = models.layer_expert_parameters / layouts.ep
    embedding = models.embedding_parameters / layouts.tp
    layer = models.layer_parameters / layouts.tp * (whole + spread)
    layer = layer + experts * (whole + np.minimum(expert_spread, 16))
    states = layers * layer
    ends = np.where((layouts.pp == 1) & (models.tied == 0), 2, 1) * embedding * (whole + spread)
    unit = (models.layer_parameters + experts) / layouts.tp
    # With a pipeline, FSDP keeps a stage's parameters gathered and its gradients whole over all its micro-batches.
    stage = layers * models.layer_parameters / layouts.tp
    units = np.where(layouts.pp > 1, (2 + stacks.grad_bytes) * stage, 2 * BUCKETS * unit)
    gathered = np.where(layouts.zero >= 3, units + 2 * 2 * embedding, 0.0)
    tokens = layouts.micro_batch * models.seq / layouts.cp
    head = stacks.loss_bytes * tokens * models.vocab / layouts.tp
    held = states + ends + gathered + WORKSPACE
    first, last = _activations(problem, layers, layouts.pp - 1), _activations(problem, layers, 0 * layouts.pp)
    fullest = held + first + np.where(layouts.pp == 1, head, 0.0)
    if np.any(most > layers):  # the second stage has a layer in the place of the embedding
        second = held - ends + layer + _activations(problem, most, np.maximum(layouts.pp - 2, 0))
        fullest = np.where(most > layers, np.maximum(fullest, second), fullest)
    return Memory(
        states=states + ends + gathered,
        activations=np.maximum(first, last),
        head=head,
        first=fullest,
        last=held + last + head,
        buckets=stacks.buckets + CHANNELS * _group_kinds(layouts) * np.ones_like(held),
    )
