"""What each rank draws from a generator that is seeded with its number: it tells whether that was set back."""

from __future__ import annotations

import torch


def drawn_after(rank: int, steps: int) -> float:
    """What a rank draws at the end, after so many steps with a batch of 4 times 8 each."""
    generator = torch.Generator()
    generator.manual_seed(rank)
    for _ in range(steps):
        torch.randn(4, 8, generator=generator)
    return float(torch.rand(1, generator=generator))
