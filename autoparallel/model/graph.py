"""A model as operators in the order in which they run: FLOPs, parameters, and the bytes that would cross a cut.

RES-19. FLOPs are those of matrix products, convolutions and attention, as the field counts them for MFU; the rest is 0.
A value is a tensor that one operator makes and others read. What every stage has or can make by itself is no value:
parameters, the batch (each stage's data loader has it), and what is made from these alone without FLOPs, as a mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

MOST_FLOPS = 2**62  # sums are exact in int64
_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=[. ]|$)")


@dataclass(frozen=True)
class Operator:
    """One operator. ``name``: the module that runs it, a space, its operation.

    ``parameters``: indices into the graph's. Of attention: ``masked``: it leaves out what a causal mask hides, which
    its FLOPs count; ``head_size``: numbers of a head.
    """

    name: str
    forward_flops: int = 0
    backward_flops: int = 0
    parameters: tuple[int, ...] = ()
    masked: bool = False
    head_size: int = 0

    @property
    def module(self) -> str:
        """Return the path of the module that runs it; empty for the model itself."""
        return self.name.rpartition(" ")[0]

    @property
    def block(self) -> str:
        """Return the repeated block that it belongs to (``h.3`` of ``h.3.mlp linear``); empty outside of blocks."""
        found = _BLOCK.match(self.name)
        return found.group() if found else ""


@dataclass(frozen=True)
class Value:
    """A tensor: the operator that makes it, and its readers, in order. The last one reads the model's results, too."""

    producer: int
    readers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Parameter:
    """A parameter. ``aliases``: other names of the same (tied) parameter, which is counted once."""

    name: str
    count: int
    size_bytes: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperatorGraph:
    """A model. ``uncounted``: operators without a FLOPs formula, counted as 0.

    ``order``: that of ``operators``, fixed.

    Raises UsageError where an operator reads a value that is made after it, or the FLOPs are too many to be summed
    exactly.
    """

    name: str
    operators: tuple[Operator, ...]
    values: tuple[Value, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    uncounted: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        count = len(self.operators)
        for value in self.values:
            if not 0 <= value.producer < count or any(not value.producer < r < count for r in value.readers):
                raise UsageError(f"{self._at(value.producer)} is read by an operator that does not come after it")
            if value.size_bytes < 0:
                raise UsageError(f"{self._at(value.producer)} makes {value.size_bytes} bytes")
        if any(min(operator.forward_flops, operator.backward_flops) < 0 for operator in self.operators):
            raise UsageError("an operator has fewer than 0 FLOPs")
        if self.total_flops > MOST_FLOPS:
            raise UsageError(f"{self.total_flops:.2e} FLOPs are too many: describe one micro-batch, not a whole step")

    def _at(self, index: int) -> str:
        if 0 <= index < len(self.operators):
            return f"what operator {index} ({printable(self.operators[index].name, 100)}) makes"
        return f"what operator {index} of {len(self.operators)} makes"

    @property
    def total_flops(self) -> int:
        """Return the FLOPs of a forward and a backward pass."""
        return self.forward_flops + sum(operator.backward_flops for operator in self.operators)

    @property
    def forward_flops(self) -> int:
        return sum(operator.forward_flops for operator in self.operators)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    @cached_property
    def flops(self) -> NDArray[np.int64]:
        """Return the FLOPs of each operator, forward and backward, shape (operators,)."""
        return np.array([op.forward_flops + op.backward_flops for op in self.operators], dtype=np.int64)

    @cached_property
    def made_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each operator writes, of values that others read, shape (operators,)."""
        made = np.zeros(len(self.operators), dtype=np.int64)
        for value in self.values:
            made[value.producer] += value.size_bytes
        return made

    @cached_property
    def read_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of values that each operator reads, shape (operators,)."""
        read = np.zeros(len(self.operators), dtype=np.int64)
        for value in self.values:
            read[list(value.readers)] += value.size_bytes
        return read

    @cached_property
    def parameter_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of the parameters that each operator uses, shape (operators,)."""
        sizes = np.array([one.size_bytes for one in self.parameters], dtype=np.int64)
        return np.array([sizes[list(op.parameters)].sum() for op in self.operators], dtype=np.int64)

    @cached_property
    def cut_bytes(self) -> NDArray[np.int64]:
        """Return, shape (operators,), the bytes that a stage which begins with this operator receives.

        A value is relayed from stage to stage until its last reader has it: it counts in every cut that it crosses,
        once, however many operators read it.
        """
        change = np.zeros(len(self.operators) + 1, dtype=np.int64)
        crossing = [(v.producer + 1, max(v.readers) + 1, v.size_bytes) for v in self.values if v.readers]
        if crossing:
            begin, end, size = np.array(crossing, dtype=np.int64).T
            np.add.at(change, begin, size)
            np.add.at(change, end, -size)
        return np.cumsum(change)[:-1]

    @cached_property
    def block_starts(self) -> NDArray[np.bool_]:
        """Return, shape (operators,), whether this operator is the first of a block, or in none."""
        blocks = [operator.block for operator in self.operators]
        return np.array([not b or b != a for a, b in zip(["", *blocks], blocks, strict=False)], dtype=np.bool_)

    def parameters_of(self, first: int, end: int) -> set[int]:
        """Return indices of the parameters that operators first … end - 1 use."""
        return {index for operator in self.operators[first:end] for index in operator.parameters}
