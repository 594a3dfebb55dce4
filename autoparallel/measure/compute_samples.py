"""Operators measured on one GPU, and the cost model's parameters that follow. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SampleKind:
    """A kind of operator. ``columns``: names of a shape's numbers; ``work``: FLOPs or bytes of one call."""

    columns: tuple[str, ...]
    units: str
    work: Callable[[Shape], float]


_HEADS = ("batch", "heads", "seq", "head_dim")


def _attention(shape: Shape) -> float:
    """Return the FLOPs of causal attention, forward and backward: 3.5 times the forward pass, half of the scores."""
    batch, heads, seq, head_dim = shape
    return 3.5 * 4.0 * batch * heads * seq**2 * head_dim / 2


KINDS: Mapping[str, SampleKind] = {
    # bf16 products of (m, k) by (k, n)
    "matmul": SampleKind(("m", "n", "k"), "FLOP", lambda s: 2.0 * s[0] * s[1] * s[2]),
    # PyTorch's FlashAttention, and cuDNN's
    "attention": SampleKind(_HEADS, "FLOP", _attention),
    "attention-cudnn": SampleKind(_HEADS, "FLOP", _attention),
    # forward: read and write of bf16
    "normalisation": SampleKind(("rows", "hidden"), "byte", lambda s: 4.0 * s[0] * s[1]),
    # fused AdamW in fp32: parameter, gradient and two moments read, three of them written
    "optimizer": SampleKind(("parameters",), "byte", lambda s: 28.0 * s[0]),
}


@dataclass(frozen=True)
class Sample:
    """One operator's repeats, in seconds per call."""

    kind: str
    shape: Shape
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.samples_s)

    @property
    def rate(self) -> float:
        """Return the rate, in FLOP/s or bytes/s."""
        return KINDS[self.kind].work(self.shape) / self.median_s
