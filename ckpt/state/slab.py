"""Slabs: a process's part of a tensor that many processes hold together, so that another layout can load it.

A slab is a box of the whole (global) tensor: its start, and the shape of the local tensor. A DTensor is one by its
placements; numpy and MPI codes use ``Slab``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import prod
from typing import Any, NamedTuple

from resilio_hpc.core.errors import UsageError

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor: index of its first element and its shape, both with a number per dimension."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return what both have in common; None if that is nothing."""
        start = tuple(max(mine, theirs) for mine, theirs in zip(self.start, other.start, strict=True))
        ends = (
            min(a + length, b + width)
            for a, length, b, width in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - first for first, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def overlaps(self, other: Box) -> bool:
        """Return whether they have an element in common."""
        return self.intersect(other) is not None

    def seen_from(self, start: Shape) -> Box:
        """Return the same box, counted from ``start`` on."""
        return Box(tuple(mine - theirs for mine, theirs in zip(self.start, start, strict=True)), self.shape)


def any_overlap(boxes: Sequence[Box], dimension: int = 0) -> bool:
    """Return whether two of these boxes, none of them empty, have an element in common.

    Fast for boxes of a grid, however many: along each dimension they share a range or lie apart.
    """
    if len(boxes) < 2:
        return False
    if dimension == len(boxes[0].start):
        return True  # they overlap in every dimension
    groups: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        groups[box.start[dimension], box.start[dimension] + box.shape[dimension]].append(box)
    if any(end > start for (_, end), (start, _) in pairwise(sorted(groups))):
        return any(one.overlaps(other) for one, other in combinations(boxes, 2))
    return any(any_overlap(group, dimension + 1) for group in groups.values())


def runs(shape: Shape, limit: int) -> Iterator[Box]:
    """Yield the boxes of a tensor, of at most ``limit`` elements, each one run in row-major order, in that order."""
    if prod(shape) <= limit:
        if prod(shape):
            yield Box((0,) * len(shape), shape)
        return
    level = next(level for level in range(len(shape)) if prod(shape[level + 1 :]) <= limit)
    rows, inner = limit // prod(shape[level + 1 :]), shape[level + 1 :]
    for outer in product(*map(range, shape[:level])):
        for first in range(0, shape[level], rows):
            count = min(rows, shape[level] - first)
            yield Box((*outer, first, *(0,) * len(inner)), (*(1,) * level, count, *inner))


@dataclass(frozen=True, eq=False)
class Slab:
    """In a state, instead of a tensor: ``tensor`` is the box of a tensor of ``global_shape`` that begins at ``start``.

    All processes give the same path in the state to their parts of one tensor. Boxes do not overlap, but for copies of
    the same box: those should have another ``replica`` than 0, since only 0 goes to disk. ``copies``: how many
    processes are known to have this box; ``ranks``: which, where that is known. Raises UsageError.
    """

    tensor: Any
    global_shape: Sequence[int]
    start: Sequence[int]
    replica: int = 0
    copies: int = 1
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.global_shape) == len(self.start):
            raise UsageError(
                f"Slab: a tensor of shape {list(shape)} is no part of one of shape {list(self.global_shape)} that "
                f"begins at {list(self.start)}: give one number per dimension"
            )
        for length, whole, first in zip(shape, self.global_shape, self.start, strict=True):
            if type(first) is not int or type(whole) is not int or not 0 <= first <= first + length <= whole:
                raise UsageError(
                    f"Slab: a part of shape {list(shape)} that begins at {list(self.start)} lies outside of a tensor "
                    f"of shape {list(self.global_shape)}"
                )
        if type(self.replica) is not int or self.replica < 0:
            raise UsageError(f"Slab: replica {self.replica!r} is not a number from 0 on")


def is_dtensor(value: Any) -> bool:
    """Return whether it is a torch DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def slab_of(value: Any) -> Slab | None:
    """Return the slab that a Slab or a DTensor is; None for anything else.

    Raises UsageError for a pending sum.
    """
    if type(value) is Slab:
        return value
    return _of_dtensor(value) if is_dtensor(value) else None


def _of_dtensor(value: Any) -> Slab:
    local = value.detach().to_local()
    part = _part_of(tuple(value.shape), value.device_mesh, tuple(value.placements))
    if tuple(local.shape) != part.box.shape:
        raise UsageError(
            f"a DTensor whose local part has shape {list(local.shape)}, not {list(part.box.shape)}, cannot be saved"
        )
    return Slab(local, tuple(value.shape), part.box.start, part.replica, part.copies, part.ranks)


class _Part(NamedTuple):
    box: Box
    replica: int
    copies: int
    ranks: tuple[int, ...]


@lru_cache(4096)  # torch is slow here, and every save asks again
def _part_of(shape: Shape, mesh: Any, placements: tuple[Any, ...]) -> _Part:
    """Return this process's part of a DTensor.

    Raises UsageError.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in placements):
        raise UsageError("a DTensor with a partial placement cannot be saved; redistribute() it first")
    _check_one_piece(shape, mesh.shape, placements)
    local, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    at = mesh.get_coordinate() or ()
    is_copied = [isinstance(placement, Replicate) for placement in placements]
    copy_numbers = [number for number, copied in zip(at, is_copied, strict=True) if copied]
    here = tuple(slice(None) if copied else number for number, copied in zip(at, is_copied, strict=True))
    ranks = tuple(sorted(mesh.mesh[here].flatten().tolist()))
    # a local part without elements may have a start behind the end
    first = tuple(min(begin, whole) for begin, whole in zip(start, shape, strict=True))
    return _Part(Box(first, tuple(local)), int(any(copy_numbers)), len(ranks), ranks)


def _check_one_piece(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]) -> None:
    """Check that each part is one box. FSDP over tensor parallelism cuts parts again (_StridedShard), evenly or not."""
    for number, placement in enumerate(placements):
        if type(placement).__name__ == "_StridedShard":
            dimension = placement.dim
            sizes = [
                size if getattr(other, "dim", None) == dimension else 1
                for size, other in zip(mesh, placements, strict=True)
            ]
            if prod(sizes[number + 1 :]) != placement.split_factor or shape[dimension] % prod(sizes):
                raise UsageError(
                    f"a DTensor of shape {list(shape)} with placements {list(placements)} over a mesh of {list(mesh)} "
                    "cannot be saved: the parts of dimension "
                    f"{dimension} are not of one size, or not in one piece; choose sizes that the mesh divides"
                )
