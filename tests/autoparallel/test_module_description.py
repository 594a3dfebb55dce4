"""A torch module as the decoder that the search wants: its numbers from the shapes of its parameters."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError

torch = pytest.importorskip("torch")

from resilio_hpc.autoparallel.model.module_description import described_module  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int, ffn: int, fused: bool, gated: bool) -> None:
        super().__init__()
        self.num_heads, self.groups, self.size = heads, groups, 64
        width, keys = heads * self.size, groups * self.size
        parts = [width + 2 * keys] if fused else [width, keys, keys]
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(hidden, part, bias=False) for part in parts)
        self.out = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.ModuleList(torch.nn.Linear(hidden, ffn, bias=False) for _ in range(1 + gated))
        self.down = torch.nn.Linear(ffn, hidden, bias=False)
        self.norm = torch.nn.LayerNorm(hidden)

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.shape
        normed = self.norm(x)
        joined = torch.cat([part(normed) for part in self.qkv], -1).view(batch, tokens, -1, self.size).transpose(1, 2)
        q, k, v = joined.split([self.num_heads, self.groups, self.groups], 1)
        more = self.num_heads // self.groups
        k, v = k.repeat_interleave(more, 1), v.repeat_interleave(more, 1)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, -1))
        inner = torch.nn.functional.silu(self.up[0](x))
        return x + self.down(inner * self.up[-1](x) if len(self.up) > 1 else inner)


class Decoder(torch.nn.Module):
    def __init__(self, tied: bool, **block: Any) -> None:
        super().__init__()
        hidden = block["hidden"]
        self.embedding = torch.nn.Embedding(5000, hidden)
        self.layers = torch.nn.ModuleList(Block(**block) for _ in range(6))
        self.head = torch.nn.Linear(hidden, 5000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "ffn", "gated"),
    [(8, 8, 2048, False), (8, 2, 1376, True), (4, 1, 1024, True), (8, 8, 1376, True), (8, 8, 1024, False)],
)
def test_a_decoder_has_the_numbers_it_was_made_with(
    tied: bool, fused: bool, heads: int, groups: int, ffn: int, gated: bool
) -> None:
    block = {"hidden": 512, "heads": heads, "groups": groups, "ffn": ffn, "fused": fused, "gated": gated}
    inputs = (torch.zeros(2, 128, dtype=torch.long),)
    found = described_module(lambda: (Decoder(tied, **block), inputs), "here")
    assert (found.layers, found.hidden, found.heads, found.kv_heads) == (6, 512, heads, groups)
    assert (found.ffn, found.gated, found.tied, found.vocab, found.seq) == (ffn, gated, tied, 5000, 128)
    real = sum(parameter.numel() for parameter in Decoder(tied, **block).parameters())
    assert found.parameters == pytest.approx(real, rel=0.01)  # norms and biases


def perceptron() -> Any:
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    return torch.nn.Sequential(*layers), (torch.zeros(2, 4, 8),)


def mostly_tables() -> Any:
    class Tables(Decoder):
        def __init__(self) -> None:
            super().__init__(False, hidden=512, heads=8, groups=8, ffn=2048, fused=False, gated=False)
            self.more = torch.nn.Parameter(torch.zeros(4096, 4096))

        def forward(self, ids: Any) -> Any:
            return super().forward(ids) + self.more.sum()

    return Tables(), (torch.zeros(2, 128, dtype=torch.long),)


@pytest.mark.parametrize(
    ("make", "why"), [(perceptron, "no part with matrices repeats"), (mostly_tables, "of its .* parameters")]
)
def test_what_is_no_decoder_of_equal_layers_is_refused_with_what_to_do(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=rf"model\.py:make is no decoder of equal layers: .*{why}.*describe it by"):
        described_module(make, "model.py:make")
