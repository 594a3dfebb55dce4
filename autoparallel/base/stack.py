"""What the training software does that the layout does not say: kernels, precision, overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from resilio_hpc.autoparallel.base.layout import Column


@dataclass(frozen=True)
class Stack:
    """Defaults: Megatron-Core as it is today, bf16.

    ``precision``: bits of the operands of matrix products; ``row_scales``: fp8 with a scale per row.
    ``flash``: fused attention, 1 and 2 the versions of FlashAttention, 3 cuDNN's and Transformer Engine's kernels.
    ``fused``: elementwise kernels are fused. ``causal``: the attention kernel skips masked tiles.
    ``overlap_dp``: gradients are reduced behind the last backward pass.
    ``overlap_tp``: tensor-parallel communication beside products, 0 never, 1 in the backward pass, 2 in both.
    ``scatter_p2p``: a pipeline transfer is split over the tensor-parallel ranks.
    ``grad_bytes``: bytes per element of reduced gradients; ``both_grads``: half-precision ones are kept beside them.
    ``gather_whole``: ZeRO-3 gathers tensor by tensor, each over one rail at a time.
    ``overlap_ep``: with an interleaved pipeline, expert-parallel communication runs beside another chunk's compute.
    ``balanced``: routing is forced to load all experts alike, as it is in benchmarks.
    ``fine_recompute``: what does not fit is recomputed operator by operator, cheap ones first: norms, activations.
    ``dispatch_once``: a token goes once to a node and once to a GPU, whatever the number of its experts there (DeepEP).
    ``fused_experts``: grouped products quantise and activate in their own kernels, dispatch sorts by expert (HybridEP).
    ``fp32_weights``: weights are kept in fp32, and in half precision only while in use (FSDP mixed precision).
    ``loss_bytes``: bytes per logit at the peak; ``parallel_loss_bytes``: where tp > 1 (0: the same);
    ``loss_gap_bytes``: freed meanwhile, too small a gap for what comes next.
    ``buckets``: elements of each of two flat buffers for communication, of gradients and of weights.
    ``dropout``: models without a gated MLP are trained with dropout, whose masks are kept.
    ``expert_tp``: experts are split over tensor-parallel ranks as far as these suffice.
    ``keeps_gathered``: inputs gathered for tensor parallelism are kept for the backward pass, not gathered again.
    ``keeps_products``: recomputation is operator by operator, and every second matrix product is kept.
    ``keeps_outputs``: what a pipeline stage sent is kept until its backward pass.
    ``expandable``: PyTorch's allocator grows its segments in place (expandable_segments).
    ``reports_reserved``: the memory in its log is what the allocator holds, not what it has given out.
    """

    precision: int = 16
    row_scales: bool = False
    flash: int = 3
    fused: bool = True
    causal: bool = True
    overlap_dp: bool = True
    overlap_tp: int = 1
    scatter_p2p: bool = True
    grad_bytes: int = 4
    gather_whole: bool = False
    dispatch_once: bool = False
    fused_experts: bool = False
    overlap_ep: bool = False
    balanced: bool = False
    fine_recompute: bool = False
    fp32_weights: bool = False
    both_grads: bool = False
    loss_bytes: int = 6
    parallel_loss_bytes: int = 0
    loss_gap_bytes: int = 0
    buckets: float = 0.0
    dropout: bool = False
    expert_tp: bool = False
    keeps_gathered: bool = False
    keeps_outputs: bool = False
    keeps_products: bool = False
    expandable: bool = False
    reports_reserved: bool = False


@dataclass(frozen=True)
class Stacks:
    """Stacks as columns."""

    precision: Column
    row_scales: Column
    flash: Column
    fused: Column
    causal: Column
    overlap_dp: Column
    overlap_tp: Column
    scatter_p2p: Column
    grad_bytes: Column
    gather_whole: Column
    dispatch_once: Column
    fused_experts: Column
    overlap_ep: Column
    balanced: Column
    fine_recompute: Column
    fp32_weights: Column
    both_grads: Column
    loss_bytes: Column
    parallel_loss_bytes: Column
    loss_gap_bytes: Column
    buckets: Column
    dropout: Column
    expert_tp: Column
    keeps_gathered: Column
    keeps_outputs: Column
    keeps_products: Column
    expandable: Column
    reports_reserved: Column

    @classmethod
    def of(cls, stacks: Sequence[Stack]) -> Stacks:
        return cls(**{f.name: np.array([getattr(s, f.name) for s in stacks], dtype=float) for f in fields(cls)})
