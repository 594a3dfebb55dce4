"""Properties of the training software that the layout lacks: kernels, precision, overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column, Columns, default
from resilio_hpc.autoparallel.base.layout import Layouts

Number = TypeVar("Number")
Flag = TypeVar("Flag")
Real = TypeVar("Real")


@dataclass(frozen=True)
class Settings(Generic[Number, Flag, Real]):
    """Defaults: Megatron-Core as it is today, bf16.

    ``precision``: bits of the operands of matrix products; ``row_scales``: fp8 with a scale per row.
    ``flash``: fused attention, 1 and 2 the versions of FlashAttention, 3 cuDNN's and Transformer Engine's kernels.
    ``fused``: elementwise kernels are fused. ``causal``: the attention kernel skips masked tiles.
    ``overlap_dp``: 1: gradients are reduced behind the last backward pass; 2: and parameters gathered behind the first
    forward pass, layer by layer.
    ``overlap_tp``: tensor-parallel communication beside products, 0 never, 1 in the backward pass, 2 in both.
    ``overlap_p2p``: with an interleaved pipeline, transfers run beside another chunk's compute.
    ``scatter_p2p``: a pipeline transfer is split over the tensor-parallel ranks.
    ``grad_bytes``: bytes per element of reduced gradients; ``both_grads``: half-precision ones are kept beside them.
    ``adds_in_product``: the product that gives a weight's gradient adds it to those of earlier micro-batches.
    ``gather_whole``: ZeRO-3 gathers tensor by tensor, each over one rail at a time.
    ``overlap_ep``: with an interleaved pipeline, expert-parallel communication runs beside another chunk's compute.
    ``balanced``: routing is forced to load all experts alike, as it is in benchmarks.
    ``fine_recompute``: what does not fit is recomputed operator by operator, cheap ones first: norms, activations.
    ``dispatch_once``: a token goes once to a node and once to a GPU, whatever the number of its experts there (DeepEP).
    ``fused_experts``: grouped products quantise and activate in their own kernels, dispatch sorts by expert (HybridEP).
    ``graphs``: where nodes share an NVLink domain, CUDA graphs launch attention and routing of mixtures of experts.
    ``fp8_dispatch``: tokens go to experts in fp8, and come back in half precision.
    ``lean``: norms, up-projections of latent attention and activations are computed again; experts' inputs kept in fp8.
    ``fused_clamp``: there is one kernel for the experts of ``plain_experts`` (see ``transformer.py``).
    ``fp32_weights``: weights are kept in fp32, and in half precision only while in use (FSDP mixed precision).
    ``loss_bytes``: bytes per logit at the peak; ``parallel_loss_bytes``: where tp > 1 (0: the same);
    ``loss_gap_bytes``: freed meanwhile, too small a gap for what comes next.
    ``buckets``: elements of each of two flat buffers for communication, of gradients and of weights.
    ``dropout``: models without a gated MLP are trained with dropout, whose masks are kept.
    ``expert_tp``: experts are split over tensor-parallel ranks as far as these suffice.
    ``keeps_gathered``: inputs gathered for tensor parallelism are kept for the backward pass, not gathered again.
    ``keeps_products``: recomputation is operator by operator, and every second matrix product is kept.
    ``early_stop``: recomputation of a layer stops before its last product, whose result nothing needs.
    ``keeps_outputs``: what a pipeline stage sent is kept until its backward pass.
    ``frees_inputs``: what a pipeline stage received is freed: the first norm's backward pass works from its result.
    ``avoids_record_streams``: memory of a collective is free again as soon as its result is used, not when the
    allocator has seen another stream's event.
    ``expandable``: PyTorch's allocator grows its segments in place (expandable_segments).
    ``reports_reserved``: the memory in its log is what the allocator holds, not what it has given out.
    """

    precision: Number = default(16)
    row_scales: Flag = default(False)
    flash: Number = default(3)
    fused: Flag = default(True)
    causal: Flag = default(True)
    overlap_dp: Number = default(1)
    overlap_tp: Number = default(1)
    overlap_p2p: Flag = default(False)
    scatter_p2p: Flag = default(True)
    grad_bytes: Number = default(4)
    adds_in_product: Flag = default(False)
    gather_whole: Flag = default(False)
    dispatch_once: Flag = default(False)
    fused_experts: Flag = default(False)
    graphs: Flag = default(False)
    fp8_dispatch: Flag = default(False)
    lean: Flag = default(False)
    fused_clamp: Flag = default(False)
    overlap_ep: Flag = default(False)
    balanced: Flag = default(False)
    fine_recompute: Flag = default(False)
    fp32_weights: Flag = default(False)
    both_grads: Flag = default(False)
    loss_bytes: Number = default(6)
    parallel_loss_bytes: Number = default(0)
    loss_gap_bytes: Number = default(0)
    buckets: Real = default(0.0)
    dropout: Flag = default(False)
    expert_tp: Flag = default(False)
    keeps_gathered: Flag = default(False)
    early_stop: Flag = default(False)
    keeps_outputs: Flag = default(False)
    keeps_products: Flag = default(False)
    frees_inputs: Flag = default(False)
    avoids_record_streams: Flag = default(False)
    expandable: Flag = default(False)
    reports_reserved: Flag = default(False)


@dataclass(frozen=True)
class Stack(Settings[int, bool, float]):
    """One software stack, by the properties of a framework."""


@dataclass(frozen=True)
class Stacks(Settings[Column, Column, Column], Columns):
    """Stacks as columns."""


def expert_tp(layouts: Layouts, stacks: Stacks) -> Column:
    """Return the tensor-parallel ranks that share an expert.

    As the layout says, else as the framework does it: a whole group, or what expert parallelism leaves of it.
    """
    left = np.floor(layouts.tp * layouts.dp * layouts.cp / layouts.ep)
    usual = np.where(stacks.expert_tp > 0, np.maximum(np.minimum(layouts.tp, left), 1), 1.0)
    return np.where(layouts.etp > 0, layouts.etp, usual)
