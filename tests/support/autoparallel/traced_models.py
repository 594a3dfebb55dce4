"""Small models for tests of the tracer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A layer of GPT; ``fused`` attention is one operator, else products and a softmax with a mask."""

    def __init__(self, hidden: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        if self.fused:
            core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            core = (q @ k.transpose(-1, -2)).masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(core.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq: int, fused: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.h = nn.ModuleList(Block(hidden, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        mask = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.wte(tokens) + self.wpe(torch.arange(seq, device=tokens.device))
        for block in self.h:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Steered(nn.Module):
    """Which way it goes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return self.linear(y)  # type: ignore[no-any-return]
        return y  # type: ignore[no-any-return]


class Chosen(nn.Module):
    """A shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        return self.linear(x[rows])  # type: ignore[no-any-return]


class Calls(nn.Module):
    """Calls what it is given between two linear layers."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, *inputs: Any) -> Any:
        return self.second(self.between(self.first(inputs[0]), *inputs[1:]))
