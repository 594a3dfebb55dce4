"""Flat shards: ranges of tensors' elements, as distributed optimizers and FSDP's flat parameters have them.

Such a shard begins and ends anywhere in a row. In the coordinates of the whole tensor it is a few boxes, each a slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import gt
from typing import Any

from resilio_hpc.ckpt.state.slab import Box, Shape, Slab, is_dtensor
from resilio_hpc.core.errors import UsageError


@dataclass(frozen=True, eq=False)
class FlatSlab:
    """In a state, instead of a tensor: ``tensor``, of one dimension, has elements ``first`` and on of a box.

    They are counted in row-major order. The box has ``shape`` and begins at ``start`` of a tensor of ``global_shape``;
    without both, it is the whole tensor. ``replica``: as in ``Slab``. A shard without elements is given, too, so that
    this process knows the tensor. Raises UsageError.
    """

    tensor: Any
    global_shape: Sequence[int]
    first: int = 0
    start: Sequence[int] | None = None
    shape: Sequence[int] | None = None
    replica: int = 0

    def __post_init__(self) -> None:
        if is_dtensor(self.tensor) or len(self.tensor.shape) != 1:
            raise UsageError(
                f"FlatSlab: a tensor of shape {list(self.tensor.shape)} is no flat shard: it has no one dimension"
            )
        box, count = self.box, len(self.tensor)
        if type(self.first) is not int or not 0 <= self.first <= self.first + count <= box.size:
            raise UsageError(
                f"FlatSlab: {count} elements from {self.first!r} on are not in a box of shape {list(box.shape)}"
            )
        if not box.shape and not count:
            raise UsageError("FlatSlab: a shard without elements of a single number is left out of the state")
        ends = [first + length for first, length in zip(box.start, box.shape, strict=False)]
        if not len(box.start) == len(box.shape) == len(self.global_shape) or any(map(gt, ends, self.global_shape)):
            raise UsageError(
                f"FlatSlab: a box of shape {list(box.shape)} that begins at {list(box.start)} lies outside of a tensor "
                f"of shape {list(self.global_shape)}"
            )

    @property
    def box(self) -> Box:
        """Return the box of the whole tensor that the elements are counted in."""
        if (self.start is None) is not (self.shape is None):
            raise UsageError("FlatSlab: start and shape are given together")
        if self.start is None or self.shape is None:
            return Box((0,) * len(self.global_shape), tuple(self.global_shape))
        return Box(tuple(self.start), tuple(self.shape))

    def parts(self) -> list[Slab]:
        """Return the same elements as slabs, in order: views of ``tensor``; one without elements if it has none."""
        box, count = self.box, len(self.tensor)
        flat = self.tensor.detach() if hasattr(self.tensor, "detach") else self.tensor
        if not count:
            return [Slab(flat.reshape((0, *box.shape[1:])), self.global_shape, box.start, self.replica)]
        made, at = [], 0
        for part in ranges(box.shape, self.first, self.first + count):
            start = tuple(base + more for base, more in zip(box.start, part.start, strict=True))
            tensor = flat[at : at + part.size].reshape(part.shape)  # a view, since it has one stride
            made.append(Slab(tensor, self.global_shape, start, self.replica))
            at += part.size
        return made


def ranges(shape: Shape, first: int, end: int) -> Iterator[Box]:
    """Yield the boxes that hold elements ``first`` to ``end`` (not 0 of them) of a tensor, counted by rows, in order.

    At most two for each dimension but the last, and one more.
    """
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    begin, last = first // row, end // row
    if begin == last:  # inside of one row
        yield from _in_row(shape, begin, first - begin * row, end - begin * row)
        return
    if first > begin * row:
        yield from _in_row(shape, begin, first - begin * row, row)
        begin += 1
    if last > begin:
        yield Box((begin, *(0,) * len(shape[1:])), (last - begin, *shape[1:]))
    if end > last * row:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Shape, row: int, first: int, end: int) -> Iterator[Box]:
    for box in ranges(shape[1:], first, end):
        yield Box((row, *box.start), (1, *box.shape))


def parts_of(value: Any) -> list[Slab]:
    """Return the slabs of a Slab or a FlatSlab."""
    return value.parts() if type(value) is FlatSlab else [value]
