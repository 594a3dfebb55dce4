"""Which parts of tensors a rank has: ranks with the same parts have the same tensors, as those of HSDP.

A DTensor, or a Slab, says which part of the whole tensor it is, and whether other ranks have the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.state.tensors import Leaf

_Place = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Path, shape, shape of the whole tensor, and where in that it begins."""


class PartsHeld(NamedTuple):
    """``group``: the same for ranks with the same parts. ``replicas``: of each part, in the order of the tensors."""

    group: str
    replicas: bytes


WHOLE = PartsHeld("", b"")
"""What ranks hold by layout REPLICATED."""


def parts_held(leaves: Iterable[Leaf], own: Collection[str]) -> PartsHeld | None:
    """Return which parts a rank holds; None where they are not known to be other ranks', too.

    That is so where each tensor is a part of which there are copies, or among ``own``, which are the rank's own. Single
    numbers, such as an optimizer's count of steps, are the same on all ranks that do the same steps.
    """
    places: list[_Place] = []
    replicas = bytearray()
    for leaf in leaves:
        if leaf.slab is not None:
            if leaf.slab.copies < 2:
                return None
            places.append((leaf.path, leaf.shape, tuple(leaf.slab.global_shape), tuple(leaf.slab.start)))
            replicas.append(min(leaf.slab.replica, 255))
        elif leaf.shape and leaf.path not in own:
            return None
    return PartsHeld(group_of(places), bytes(replicas)) if places else None


def group_of(places: Iterable[_Place]) -> str:
    """Return the name of the ranks that hold these parts."""
    return hashlib.sha256(msgspec.msgpack.encode(list(places))).hexdigest()[:16]
