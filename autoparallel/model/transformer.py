"""Uniform transformers: products, bytes and parameters of one layer, for many layouts at once.

Counts follow Narayanan et al. (arXiv:2104.04473, appendix) and Korthikanti et al. (arXiv:2205.05198), extended to
grouped-query attention, gated MLPs and mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from typing_extensions import Self

from resilio_hpc.autoparallel.base.columns import Column, Columns, default

Number = TypeVar("Number")
Flag = TypeVar("Flag")


@dataclass(frozen=True)
class ModelDimensions(Generic[Number, Flag]):
    """A uniform decoder. ``ffn``: width of a dense layer's MLP, ``expert_ffn``: of one expert.

    ``dense_layers``: layers of a mixture of experts that have a dense MLP. ``head_dim`` 0 means hidden / heads.
    ``window``: keys that a query may see in every second layer (0: all of them in all layers).
    ``route_nodes``: nodes that a token's experts may lie on (0: any number). ``plain_experts``: experts have biases and
    a clamped activation, for which only the newest releases have a fused kernel. ``mtp``: additional layers, each with
    a loss of its own, that predict further tokens.
    """

    layers: Number
    hidden: Number
    heads: Number
    ffn: Number
    vocab: Number
    seq: Number
    kv_heads: Number = default(0)
    head_dim: Number = default(0)
    gated: Flag = default(False)
    tied: Flag = default(False)
    experts: Number = default(0)
    topk: Number = default(0)
    expert_ffn: Number = default(0)
    shared_ffn: Number = default(0)
    dense_layers: Number = default(0)
    window: Number = default(0)
    route_nodes: Number = default(0)
    mtp: Number = default(0)
    plain_experts: Flag = default(False)


@dataclass(frozen=True)
class Transformer(ModelDimensions[int, bool]):
    """One transformer model."""

    name: str = field(kw_only=True)


@dataclass(frozen=True)
class Transformers(ModelDimensions[Column, Column], Columns):
    """Transformers as columns; ``of`` replaces each 0 by its meaning."""

    @classmethod
    def of(cls, records: Sequence[Transformer]) -> Self:
        plain = super().of(records)
        return replace(
            plain,
            kv_heads=np.where(plain.kv_heads > 0, plain.kv_heads, plain.heads),
            head_dim=np.where(plain.head_dim > 0, plain.head_dim, plain.hidden / plain.heads),
            expert_ffn=np.where(plain.expert_ffn > 0, plain.expert_ffn, plain.ffn),
            dense_layers=np.where(plain.experts > 0, plain.dense_layers, plain.layers),
        )

    @property
    def matrices(self) -> Column:
        """Return the number of matrices into the MLP: two when it is gated."""
        return 1.0 + self.gated

    @property
    def attention_width(self) -> Column:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> Column:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> Column:
        return self.hidden * (self.qkv_width + self.attention_width)

    @property
    def dense_mlp_parameters(self) -> Column:
        return self.hidden * self.ffn * (self.matrices + 1)

    @property
    def expert_parameters(self) -> Column:
        """Return the parameters of one expert."""
        return self.hidden * self.expert_ffn * (self.matrices + 1)

    @property
    def shared_parameters(self) -> Column:
        return self.hidden * (self.shared_ffn * (self.matrices + 1) + self.experts)

    @property
    def moe_share(self) -> Column:
        """Return the share of layers that are mixtures of experts."""
        return np.where(self.experts > 0, 1 - self.dense_layers / self.layers, 0.0)

    @property
    def layer_parameters(self) -> Column:
        """Return the parameters of an average layer without its experts, norms and biases."""
        moe = self.moe_share
        return self.attention_parameters + (1 - moe) * self.dense_mlp_parameters + moe * self.shared_parameters

    @property
    def layer_expert_parameters(self) -> Column:
        return self.moe_share * self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> Column:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> Column:
        """Return the number of all parameters."""
        head = np.where(self.tied > 0, 1, 2) * self.embedding_parameters
        return self.layers * (self.layer_parameters + self.layer_expert_parameters) + head

    @property
    def seen_keys(self) -> Column:
        """Return the keys that a query meets in an average layer, before causal masks."""
        return np.where(self.window > 0, (self.seq + np.minimum(2 * self.window, self.seq)) / 2, self.seq)

    @property
    def flops_per_token(self) -> Column:
        """Model FLOPs of forward and backward per token: 6 per active parameter, 12·keys·width of attention."""
        active = self.layer_parameters + self.moe_share * self.topk * self.expert_parameters
        attention = 12 * self.seen_keys * self.attention_width
        return self.layers * (6 * active + attention) + 6 * self.embedding_parameters
