"""Which ranks hold the same tensors: by the parts of DTensors and slabs, as with HSDP, or because the script says so.

A DTensor, or a Slab, says which part of the whole tensor it is, and whether other ranks have the same one. Tensors of
tensor- and pipeline-parallel ranks do not say that data-parallel ranks have the same: there the script names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import msgspec

from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.core.errors import UsageError

_Place = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Path, shape, shape of the whole tensor, and where in that it begins."""


class PartsHeld(NamedTuple):
    """``group``: the same for ranks with the same parts. ``replicas``: of each part, in the order of the tensors."""

    group: str
    replicas: bytes


WHOLE = PartsHeld("", b"")
"""What ranks hold by layout REPLICATED."""


def parts_held(leaves: Collection[Leaf], own: Collection[str], declared: str = "") -> PartsHeld | None:
    """Return which parts a rank holds; None where they are not known to be other ranks', too.

    That is so where each tensor is a part of which there are copies, or among ``own``, which are the rank's own. Single
    numbers, such as an optimizer's count of steps, are the same on all ranks that do the same steps. ``declared``: the
    name of the group by the script, which holds for every tensor.
    """
    if not declared and any(
        leaf.slab.copies < 2 if leaf.slab is not None else bool(leaf.shape) and leaf.path not in own for leaf in leaves
    ):
        return None
    common = _ranks_of(leaves)
    if not declared and common is not None and len(common) < 2:
        return None  # no other rank has all of it
    slabs = [leaf.slab for leaf in leaves if leaf.slab is not None]
    replicas = bytes(min(slab.replica, 255) for slab in slabs)
    if declared:
        return PartsHeld(declared, replicas)
    return PartsHeld(group_of(_places(leaves), common or ()), replicas) if slabs else None


def known_group(leaves: Collection[Leaf]) -> str:
    """Return the name of the ranks that have this rank's parts, by the meshes of its DTensors; "" where none tells."""
    common = _ranks_of(leaves)
    return "" if common is None else group_of(_places(leaves), common)


def declared_group(replicas: Any, rank: int) -> str:
    """Return the name of the ranks that the script has named: numbers, or a device mesh of one dimension; "": only one.

    Raises UsageError.
    """
    mesh = getattr(replicas, "mesh", None)
    if mesh is not None and mesh.ndim != 1:
        raise UsageError(f'replicas: a mesh of one dimension, such as mesh["data"], not of {mesh.ndim}')
    try:
        ranks = sorted({int(one) for one in (replicas if mesh is None else mesh.tolist())})
    except (TypeError, ValueError):
        raise UsageError(f"replicas: numbers of ranks, or a device mesh, not {replicas!r}") from None
    if rank not in ranks:
        raise UsageError(f"replicas: {ranks} are other ranks than this one, {rank}, which is one of them")
    return group_of((), ranks) if len(ranks) > 1 else ""


def group_of(places: Iterable[_Place], ranks: Collection[int] = ()) -> str:
    """Return the name of the ranks that hold these parts.

    Stages of a pipeline may have parts of the same names and shapes: ``ranks`` tells them apart.
    """
    named = [list(places), sorted(ranks)] if ranks else list(places)
    return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()[:16]


def _places(leaves: Iterable[Leaf]) -> list[_Place]:
    return [
        (leaf.path, leaf.shape, tuple(leaf.slab.global_shape), tuple(leaf.slab.start))
        for leaf in leaves
        if leaf.slab is not None
    ]


def _ranks_of(leaves: Iterable[Leaf]) -> set[int] | None:
    """Return the ranks that have all parts whose ranks are known; None where there are no such parts."""
    known = [set(leaf.slab.ranks) for leaf in leaves if leaf.slab is not None and leaf.slab.ranks]
    return set.intersection(*known) if known else None
