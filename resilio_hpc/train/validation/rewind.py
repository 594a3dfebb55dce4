"""Sets a rank back to where a step began, so that its forward and backward passes can be done again.

Parameters and optimizer states change in ``optimizer.step()`` alone, so they need no copy. What changes before is
small: generators of random numbers, the model's buffers (running statistics), and what the program names (a loader).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from resilio_hpc.ckpt.state.rng import rng_state, set_rng_state


class Rewindable(Protocol):
    """A loader, or another object whose position a step changes."""

    def state_dict(self) -> Any:
        """Return the position."""

    def load_state_dict(self, state: Any) -> Any:
        """Take up a position."""


class Position:
    """Where a step begins: ``generators`` as plain values, ``buffers`` as copies."""

    def __init__(self, model: torch.nn.Module, others: Sequence[Rewindable]) -> None:
        """Note the position of now."""
        self._model = model
        self._others = others
        self.generators = rng_state()
        self.buffers = [buffer.detach().clone() for buffer in model.buffers()]
        self._states = [copy.deepcopy(other.state_dict()) for other in others]

    def go_back(self) -> None:
        """Set all of it back."""
        self.take(self.generators, self.buffers)
        for other, state in zip(self._others, self._states, strict=True):
            other.load_state_dict(copy.deepcopy(state))

    def take(self, generators: dict[str, Any], buffers: Sequence[torch.Tensor]) -> None:
        """Take up generators and buffers, of this rank or of another one."""
        set_rng_state(generators)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(value)
