"""The roofline of a transformer's operators on one GPU: products, attention, elementwise passes, optimizer, host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stacks, expert_tp
from resilio_hpc.autoparallel.model.transformer import Transformers

TILE = 128.0
WIDE_TILE = 256.0
ALIGNED = 64.0
IDLE_POWER = 0.2  # of the board's power: static and memory; clocks under matrix products go with the root of the rest
KERNEL_S = 3e-6  # ramp and tail of one kernel, CUDA launch-to-launch on the device


@dataclass(frozen=True)
class Work:
    """Seconds per micro-batch on one GPU, forward, backward, recomputation: of a layer, of both ends of the model.

    ``forward``: share of a layer's time in its forward pass; ``weights``: in products that give gradients of weights,
    which nothing of this micro-batch waits for. ``host``: the host's seconds per layer.
    """

    layer: Column
    head: Column
    host: Column
    forward: Column
    weights: Column


@dataclass(frozen=True)
class Rates:
    """Rates that this software reaches on this machine.

    ``gradient``: bytes that a product moves per gradient of a weight.
    """

    products: Column
    attention: Column
    plain: Column
    memory: Column
    sms: Column
    wave: float
    depth: float
    misaligned: float
    gradient: Column


def _by_arch(machines: Machines, *by_arch: float) -> Column:
    values: Column = np.array(by_arch)
    return np.asarray(values[machines.arch.astype(int)])


def rates_of(machines: Machines, layouts: Layouts, stacks: Stacks, efficiency: Efficiency) -> Rates:
    """Return the rates, as columns."""
    part = _by_arch(
        machines, efficiency.gemm_volta, efficiency.gemm_ampere, efficiency.gemm_hopper, efficiency.gemm_blackwell,
        efficiency.gemm_cdna,
    )  # fmt: skip
    clocks = np.sqrt((machines.power - IDLE_POWER) / (1 - IDLE_POWER))
    plain = machines.bf16 * part * clocks
    eight = np.where(machines.fp8 > 0, machines.fp8 * part * clocks * efficiency.fp8, plain)
    four = np.where(machines.fp4 > 0, machines.fp4 * part * clocks * efficiency.fp4, eight)
    products = np.where(stacks.precision <= 4, four, np.where(stacks.precision <= 8, eight, plain))
    products = np.where(stacks.row_scales > 0, np.maximum(products * efficiency.rows, plain), products)
    products = np.where(stacks.precision >= 32, plain / 2, products)
    flash = _by_arch(
        machines,
        efficiency.flash_ampere,
        efficiency.flash_ampere,
        efficiency.flash_hopper,
        efficiency.flash_blackwell,
        efficiency.flash_cdna,
    )
    newer = _by_arch(machines, 0.0, 0.0, efficiency.cudnn_hopper, 0.0, 0.0)
    flash = np.where(stacks.flash >= 3, np.maximum(flash, newer), flash)
    flash = np.where(stacks.flash <= 1, flash * efficiency.flash_one, flash)
    return Rates(
        products=products,
        # a score of a head of 128 is 512 FLOPs and an exponential; an SM of B200 has 8,192 and 16 of these a clock
        attention=machines.bf16 * flash * clocks * 2 / (1 + 1 / machines.exponentials),
        plain=plain,
        memory=machines.memory_bandwidth * efficiency.memory,
        sms=machines.sms,
        wave=efficiency.wave,
        depth=efficiency.depth,
        misaligned=efficiency.misaligned,
        gradient=np.where(_adds_in_product(layouts, stacks), 2.0 * stacks.grad_bytes, 2.0),
    )


def _product(
    m: Column, n: Column, k: Column, count: Column | float, rates: Rates, result: Column | float = 2
) -> Column:
    """Return the seconds of ``count`` products of (m, k) by (k, n) in one kernel. ``result``: bytes moved per entry."""
    waves = count * np.ceil(m / TILE) * np.ceil(n / WIDE_TILE) / rates.sms
    reach = waves / (waves + rates.wave) * k / (k + rates.depth)
    aligned = (np.mod(n, ALIGNED) == 0) & (np.mod(k, ALIGNED) == 0)
    reach = reach * np.where(aligned, 1.0, rates.misaligned)
    compute = 2 * count * m * n * k / (rates.products * reach)
    traffic = count * (result * m * n + 2 * (m * k + k * n)) / rates.memory
    return np.maximum(compute, traffic) + KERNEL_S


_Linear: TypeAlias = tuple[Column, Column, Column]


def _linear(m: Column, n: Column, k: Column, count: Column | float, rates: Rates) -> _Linear:
    """Return the seconds of a linear layer: forward, gradients of its input, gradients of its weights."""
    weights = _product(k, n, m, count, rates, rates.gradient)
    return _product(m, n, k, count, rates), _product(m, k, n, count, rates), weights


def head_reach(size: Column, flash: Column | float) -> Column:
    """Return what fused attention reaches with heads of this size, of the rate with 128: 64 fill half of a tile.

    Version 1 halves its blocks for heads of 128, so it is as fast with 64.
    """
    return np.where(np.asarray(flash) <= 1, 1.0, np.minimum(size / (size + 32) * 1.25, 1.1))


def _attention(
    models: Transformers, layouts: Layouts, stacks: Stacks, rates: Rates, efficiency: Efficiency
) -> tuple[Column, Column]:
    """Return the seconds of the attention core: forward and backward."""
    tokens = layouts.micro_batch * models.seq / layouts.cp
    heads = models.heads / layouts.tp
    scores = tokens * models.seen_keys * heads
    seen = np.where(stacks.causal > 0, 0.5, 1.0)
    flops = 4 * scores * models.head_dim
    fused = flops * seen / (rates.attention * head_reach(models.head_dim, stacks.flash)) + KERNEL_S
    rounded = np.ceil(models.head_dim / TILE) * TILE
    ragged = np.where(np.mod(models.head_dim, 8) == 0, 1.0, 0.25)
    products = 4 * scores * (models.head_dim + rounded) / 2 / (rates.plain * 0.6 * ragged)
    passes = efficiency.unfused_softmax * scores * 2 / rates.memory
    forward = np.where(stacks.flash > 0, fused, products + 5.5 * passes)
    return forward, np.where(stacks.flash > 0, 2.5 * fused, 2 * products + 7 * passes)


def _elementwise(models: Transformers, layouts: Layouts, stacks: Stacks, efficiency: Efficiency) -> Column:
    """Return the bytes of the forward pass of one layer outside products and attention."""
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    # eager PyTorch: each step of a norm, of positions, of casts between precisions is a kernel of its own
    slow = np.where(stacks.fused == 0, efficiency.eager, 1.0)
    norms = (
        (4 * slow + 6 + 2 * (stacks.flash == 0)) * models.hidden / whole
    )  # norms, residual sums, dropout before 2023
    inner = 2 * slow * models.qkv_width / layouts.tp  # positions, transposes
    moe = models.moe_share
    widths = (1 - moe) * models.ffn + moe * (models.topk * models.expert_ffn + models.shared_ffn)
    activation = (1 + models.matrices) * widths / layouts.tp
    # bias (2 widths in, 2 out), two clamps, a sigmoid of a product, two more products, a sum: each a kernel of its own
    apart = (models.plain_experts > 0) & (stacks.fused_clamp == 0)
    activation = activation + np.where(apart, 20 * moe * models.topk * models.expert_ffn / layouts.tp, 0.0)
    # fused: of the passes over routed tokens only the exchange is left, there and back; of the activation the products'
    # own
    fused = stacks.fused_experts > 0
    passes = np.where(fused, efficiency.dispatch / 3, efficiency.dispatch)
    # with one expert on a rank nothing is sorted by expert: only what comes in and goes out is permuted
    passes = np.where(~fused & (models.experts <= layouts.ep), passes / 2, passes)
    routed = moe * models.topk * passes * models.hidden / layouts.tp
    casts = np.where((stacks.precision <= 8) & ~fused, 1.25, 1.0)
    total: Column = (norms + inner + activation) * efficiency.elementwise + routed
    return 2 * tokens * total * casts


def _layer_products(
    models: Transformers, layouts: Layouts, stacks: Stacks, rates: Rates, efficiency: Efficiency
) -> _Linear:
    """Return the seconds of all linear layers of an average layer, as ``_linear``."""
    tokens = layouts.micro_batch * models.seq / layouts.cp
    tp = layouts.tp
    parts = [
        (_linear(tokens, models.qkv_width / tp, models.hidden, 1, rates), np.ones(1)),
        (_linear(tokens, models.hidden, models.attention_width / tp, 1, rates), np.ones(1)),
    ]
    dense = 1 - models.moe_share
    up, down = models.matrices * models.ffn / tp, models.ffn / tp
    parts.append((_linear(tokens, up, models.hidden, 1, rates), dense))
    parts.append((_linear(tokens, models.hidden, down, 1, rates), dense))
    if np.any(models.moe_share > 0):
        local = np.maximum(models.experts / layouts.ep, 1)
        fullest = np.where(stacks.balanced > 0, 1.0, efficiency.imbalance)
        split = expert_tp(layouts, stacks)  # its ranks work on the same tokens, each with a part of the expert
        each = tokens / tp * split * np.maximum(models.topk, 1) * fullest / local
        width = np.maximum(models.expert_ffn, 1) / split
        for n, k in ((models.matrices * width, models.hidden), (models.hidden, width)):
            parts.append((_linear(each, n, k, local, rates), models.moe_share))
        shared = np.maximum(models.shared_ffn, 1) / tp
        with_shared = models.moe_share * (models.shared_ffn > 0)
        parts.append((_linear(tokens, models.matrices * shared, models.hidden, 1, rates), with_shared))
        parts.append((_linear(tokens, models.hidden, shared, 1, rates), with_shared))
    return tuple(sum(times[part] * share for times, share in parts) for part in range(3))  # type: ignore[return-value]


def _adds_in_product(layouts: Layouts, stacks: Stacks) -> NDArray[np.bool_]:
    return np.asarray((stacks.adds_in_product > 0) & (layouts.micro_batches > 1) & (layouts.zero < 3))


def _loss_bytes(stacks: Stacks) -> Column:
    """Return the bytes that the loss moves per logit: in place in half precision, by a few kernels, or all in fp32."""
    return np.select([stacks.loss_bytes <= 4, stacks.loss_bytes >= 12], [8.0, 28.0], 20.0)


def _accumulation(models: Transformers, layouts: Layouts, stacks: Stacks) -> Column:
    """Return the bytes to add one micro-batch's gradients of one layer to those of the others.

    FSDP first lays the layer's gradients side by side and casts them for the reduction.
    """
    split = np.where(layouts.etp > 0, layouts.etp, layouts.tp)
    held = models.layer_parameters / layouts.tp + models.layer_expert_parameters / layouts.ep / split
    apart = (layouts.micro_batches > 1) & ~_adds_in_product(layouts, stacks)
    added = np.where(apart, held * (2 * stacks.grad_bytes + 2), 0.0)
    return np.where(layouts.zero >= 3, added / layouts.dp + held * (6 + stacks.grad_bytes), added)


def work(models: Transformers, layouts: Layouts, machines: Machines, stacks: Stacks, efficiency: Efficiency) -> Work:
    """Return the seconds of one layer and of embedding, head and loss for one micro-batch on one GPU."""
    rates = rates_of(machines, layouts, stacks, efficiency)
    forward, inputs, weights = _layer_products(models, layouts, stacks, rates, efficiency)
    backward = inputs + weights
    core, core_back = _attention(models, layouts, stacks, rates, efficiency)
    passes = _elementwise(models, layouts, stacks, efficiency) / rates.memory
    full = (layouts.recompute == Recompute.FULL) * 1.0
    selective = (layouts.recompute == Recompute.SELECTIVE) * 1.0
    again = np.where(stacks.fine_recompute > 0, passes, (forward + passes + core) / 2)
    layer = (1 + full) * (forward + passes + core) + selective * core + backward + core_back + 1.5 * passes
    layer = layer + (layouts.recompute == Recompute.ALTERNATE) * again
    layer = layer + (stacks.lean > 0) * passes
    last = _product(layouts.micro_batch * models.seq / layouts.cp, models.hidden, models.ffn / layouts.tp, 1, rates)
    layer = layer - full * (stacks.early_stop > 0) * last
    layer = layer + _accumulation(models, layouts, stacks) / rates.memory
    tokens = layouts.micro_batch * models.seq / layouts.cp
    vocab = models.vocab / layouts.tp
    logits, *logits_back = _linear(tokens, vocab, models.hidden, 1, rates)
    loss = tokens * (vocab * _loss_bytes(stacks) + 16 * models.hidden) / rates.memory
    host = efficiency.host_us * np.where(stacks.fused > 0, 1.0, 1.3) * (1 + full / 3)
    # router, sorting there and back, quantising per expert: about as many launches again as a dense layer has
    host = host * (1 + models.moe_share)
    host = host * np.where(captured(models, machines, stacks), 0.5, 1.0)  # experts, whose sizes vary, are not captured
    batches = layouts.micro_batch * models.heads / layouts.tp
    refused = (stacks.flash == 0) & (np.mod(batches, 4) != 0)
    host = host * np.where(refused, efficiency.host_softmax, 1.0)
    collectives = np.where(layouts.tp > 1, (4 + 2 * full) * efficiency.host_comm_us, 0.0)
    head = logits + sum(logits_back) + loss
    return Work(layer, head, (host + collectives) * 1e-6, (forward + passes + core) / layer, weights / layer)


def captured(models: Transformers, machines: Machines, stacks: Stacks) -> NDArray[np.bool_]:
    """Return where CUDA graphs launch what they can of layers with experts."""
    return np.asarray((stacks.graphs > 0) & (models.experts > 0) & (machines.domain_gpus > machines.node_gpus))


def optimizer_time(held: Column, layouts: Layouts, machines: Machines, efficiency: Efficiency) -> Column:
    """Return the seconds of Adam over a GPU's parameters: 30 bytes per parameter, and the norm of its gradients."""
    share = np.where(layouts.zero >= 1, layouts.dp * layouts.cp / layouts.replicas, 1)
    return (
        held
        * (30 / share + 4 / np.where(layouts.zero >= 2, share, 1))
        / (machines.memory_bandwidth * efficiency.memory)
    )
