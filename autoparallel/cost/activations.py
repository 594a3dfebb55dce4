"""Bytes of activations that one layer keeps for one micro-batch, for many layouts at once.

They follow Korthikanti et al. (arXiv:2205.05198), extended to grouped queries, gated MLPs and experts.
"""

from __future__ import annotations

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.layout import Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stacks, expert_tp
from resilio_hpc.autoparallel.model.transformer import Transformers


def layer_activations(models: Transformers, layouts: Layouts, stacks: Stacks) -> tuple[Column, Column]:
    """Return the bytes of one layer and micro-batch: all that backward needs, and the layer's input alone."""
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    masks = 2.0 * ((stacks.dropout > 0) & (models.gated == 0))
    inputs = (8 + masks) * models.hidden / whole
    attention = 2 * (models.qkv_width + models.attention_width) / layouts.tp
    scores = np.where(stacks.flash > 0, 0.0, 5 * models.heads * models.seen_keys / layouts.tp)
    scores = np.where(layouts.recompute == Recompute.SELECTIVE, 0.0, scores)
    all_kept = inputs + attention + _mlp(models, layouts, stacks) + scores
    # inputs of attention and MLP; attention's result and what it multiplied; inputs of the experts' two products in fp8
    moe = models.moe_share
    lean = 2 * 2 * models.hidden / whole + 2 * models.attention_width / layouts.tp
    lean = (
        lean + (moe * models.topk * (models.hidden + 2 * models.expert_ffn) + (1 - moe) * 2 * models.ffn) / layouts.tp
    )
    lean = lean + moe * 2 * models.shared_ffn / layouts.tp
    kept = np.where(stacks.lean > 0, lean, all_kept)
    return tokens * kept, tokens * 2 * models.hidden / whole


def _mlp(models: Transformers, layouts: Layouts, stacks: Stacks) -> Column:
    """Return the bytes per token between the matrices of an average layer's MLP, and of the copies for experts.

    Ranks that share an expert gather each other's tokens for it.
    """
    tp, moe, split = layouts.tp, models.moe_share, expert_tp(layouts, stacks)
    dense = (1 - moe) * models.ffn + moe * models.shared_ffn
    copies = moe * models.topk / tp
    routed = copies * models.expert_ffn
    return 2 * (models.matrices + 1) * (dense / tp + routed) + 2 * (split + 1) * copies * models.hidden


def checkpointed(models: Transformers, layouts: Layouts, stacks: Stacks) -> Column:
    """Return the bytes of one layer and micro-batch that torchtitan's operator-level checkpointing keeps.

    Kept are the layer's input, attention's output, and the results of every second matrix product: of q, k, v, o, w1,
    w3, w2 the first, third, fifth and last. Compiled, the last one is not kept, since no backward pass reads it.
    """
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    moe = models.moe_share
    width = (1 - moe) * models.ffn + moe * (models.topk * models.expert_ffn + models.shared_ffn)
    split = models.attention_width * 2 + models.kv_heads * models.head_dim + width
    last = np.where((stacks.fused == 0) & (models.gated > 0), models.hidden, 0.0)
    return tokens * 2 * (models.hidden / whole + split / layouts.tp + last)


def movable(models: Transformers, layouts: Layouts, stacks: Stacks) -> Column:
    """Return, of these bytes, those that a framework can keep in the host's memory.

    Megatron-Core copies the inputs of norms, of attention and of its products, and of experts
    (--fine-grained-activation-offloading); a dense MLP's stay. DeepSpeed copies what recomputation starts from
    (cpu_checkpointing).
    """
    tokens = layouts.micro_batch * models.seq / layouts.cp
    whole = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    attention = 6 * models.hidden / whole + 2 * (models.qkv_width + models.attention_width) / layouts.tp
    experts = models.moe_share * models.topk / layouts.tp * 2 * (models.hidden + models.matrices * models.expert_ffn)
    start = 2 * models.hidden / whole
    return tokens * np.where(layouts.recompute == Recompute.FULL, start, attention + experts)
