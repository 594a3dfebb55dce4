"""How a training script becomes wrong in silence: a bit of a parameter that no step changes. Needs torch."""

from __future__ import annotations

from typing import Any


def table() -> Any:
    """Return a module with parameters, the same on all ranks."""
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(64, 64, bias=False)


def flip(module: Any) -> None:
    """Flip one bit of its parameter, as a fault of memory does."""
    import torch

    with torch.no_grad():
        module.weight.view(torch.int32)[3, 5] ^= 1 << 20
