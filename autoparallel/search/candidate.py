"""One answer of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilio_hpc.autoparallel.base.shapes import Shape

if TYPE_CHECKING:  # it needs numpy, which a launcher that never plans should not load
    from resilio_hpc.autoparallel.base.layout import Layout


@dataclass(frozen=True)
class Candidate:
    """A shape and what is expected of it.

    ``step_s``: seconds per step; ``speed``: reference batches per second, to compare candidates by; ``more_nodes``:
    how many it needs beyond those that the run holds; ``startable``: so many are idle now. ``data_parallel``: copies
    of the model; ``accumulation``: micro batches that each adds up per step, 0 where the batch is not known.
    ``layout``: the best one, where the model knows layouts.
    """

    shape: Shape
    partition: str
    step_s: float
    speed: float
    more_nodes: int
    startable: bool
    data_parallel: int
    accumulation: int = 0
    layout: Layout | None = None

    @property
    def nodes(self) -> int:
        """Of its shape."""
        return self.shape.nodes
