"""Modules of plain torch code that are no decoders of equal layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Widening(torch.nn.Module):
    """A decoder whose layers widen with their depth: heads and MLP."""

    def __init__(self, layers: int = 8, hidden: int = 256, vocab: int = 1000, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = torch.nn.Embedding(vocab, hidden)
        self.layers = torch.nn.ModuleList(WideningLayer(hidden, 2 + i, 64 * (4 + i)) for i in range(layers))
        self.head = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class WideningLayer(torch.nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * heads * 64), torch.nn.Linear(heads * 64, hidden)
        self.up, self.down = torch.nn.Linear(hidden, ffn), torch.nn.Linear(ffn, hidden)

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3 * self.heads, 64).transpose(1, 2).chunk(3, 1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(functional.gelu(self.up(x)))


class Skipping(torch.nn.Module):
    """A convolutional network with skip connections from its first half to its second."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip(widths, (*widths[1:], widths[-1]), strict=True))
        self.down = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.up = torch.nn.ModuleList(torch.nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(8, a) for a, _ in reversed(pairs))
        self.last = torch.nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        h, kept = self.first(x), []
        for layer in self.down:
            h = functional.silu(layer(h))
            kept.append(h)
        for layer, norm in zip(self.up, self.norms, strict=True):
            h = functional.silu(norm(layer(torch.cat([h, kept.pop()], 1))))
        return (self.last(h) - x).pow(2).mean()


def widening(layers: int = 8, hidden: int = 256, samples: int = 2, recompute: bool = False) -> Any:
    """Return the module in bf16 and a micro-batch, as ``resilio plan FILE.py:NAME`` wants them."""
    module = Widening(layers, hidden, recompute=recompute).to(torch.bfloat16)
    return module, (torch.zeros(samples, 64, dtype=torch.long),)


def skipping() -> Any:
    """Return the module in fp32 and a micro-batch."""
    return Skipping(), (torch.zeros(4, 3, 16, 16),)
