"""A traced model as the search of any torch module wants it: operators, their activations, what a sample is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.model.graph import OperatorGraph


@dataclass(frozen=True)
class TracedModel:
    """``graph`` of ``samples`` samples, each of ``tokens`` tokens (0: its inputs are no sequences of numbers).

    ``saved_bytes``, shape (operators,): what autograd keeps for the backward pass from this operator on.
    """

    graph: OperatorGraph
    samples: int
    tokens: int
    saved_bytes: NDArray[np.int64]

    @property
    def flops_per_sample(self) -> float:
        """Return the FLOPs of a forward and a backward pass."""
        return self.graph.total_flops / self.samples

    @cached_property
    def element_bytes(self) -> int:
        """Return the bytes of an element, as most parameters have it."""
        by_size = dict[int, int]()
        for one in self.graph.parameters:
            size = max(one.size_bytes // max(one.count, 1), 1)
            by_size[size] = by_size.get(size, 0) + one.count
        return max(by_size, key=by_size.__getitem__, default=4)

    @cached_property
    def in_blocks(self) -> NDArray[np.bool_]:
        """Return, shape (operators,), whether an operator belongs to a repeated block, which may be recomputed."""
        return np.array([bool(operator.block) for operator in self.graph.operators], dtype=np.bool_)

    @cached_property
    def may_begin(self) -> NDArray[np.bool_]:
        """Return, shape (operators,), whether a pipeline stage may begin with it: with a block or a module, whole.

        What the model itself computes between its parts begins none, since a framework cuts a model at its parts.
        """
        modules = [operator.module for operator in self.graph.operators]
        other = [bool(b) and b != a for a, b in zip(["", *modules], modules, strict=False)]
        return np.asarray(self.graph.block_starts & np.array(other, dtype=np.bool_))

    @property
    def most_stages(self) -> int:
        """Return into how many pipeline stages it can be cut."""
        return int(self.may_begin[1:].sum()) + 1
