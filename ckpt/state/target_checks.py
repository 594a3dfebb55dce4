"""Whether a restore can fill a live tensor: its dtype and shape, and memory of its own for each element."""

from __future__ import annotations

import sys
from operator import mul
from typing import Any

from resilio_hpc.ckpt.state.meta_device import is_meta
from resilio_hpc.ckpt.state.tensors import Kind, describe, dtype_name
from resilio_hpc.core.errors import LayoutMismatch, UsageError


def _check_writable(target: Any) -> None:
    """Raise UsageError if two elements of a live tensor share memory, so that it cannot be filled. Changes nothing."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        if not target.flags.writeable:
            raise UsageError("the array in the state is read-only, nothing can be restored into it")
        stride = [step // (target.itemsize or 1) for step in target.strides]
    else:
        stride = target.stride()
    if _shares_elements(target.shape, stride):
        raise UsageError(
            "elements of the tensor in the state share memory (expand(), as_strided()), nothing can be restored into "
            "it; give a tensor with memory for each, such as its clone()"
        )


def _shares_elements(shape: Any, stride: Any) -> bool:
    used = sorted((abs(step), length) for step, length in zip(stride, shape, strict=True) if length > 1)
    if 0 in shape or not used:
        return False
    extent = 1
    for step, length in used:
        if step < extent:
            return step == 0 or _lands_twice(used)
        extent += step * (length - 1)
    return False


def _lands_twice(used: list[tuple[int, int]]) -> bool:
    """Check element by element, for the rare views that are neither simple nor expanded."""
    import numpy

    places = numpy.zeros(1, dtype=numpy.int64)
    for step, length in used:
        places = numpy.add.outer(places, step * numpy.arange(length)).ravel()
    return len(numpy.unique(places)) != len(places)


def check_fits(target: Any, kind: Kind, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise LayoutMismatch unless a saved tensor fits ``target`` as it is, UsageError for a read-only target."""
    if is_meta(target):
        live: tuple[Kind, str, tuple[int, ...]] = "torch", dtype_name(target.dtype), tuple(target.shape)
    else:
        try:
            leaf = describe(target, "")
        except UsageError as error:
            raise UsageError(f"nothing can be restored into it: {error}") from error
        live = leaf.kind, leaf.dtype, leaf.shape
    if live[0] != kind:
        raise LayoutMismatch(f"the checkpoint holds a {kind} tensor, the state a {live[0]} tensor")
    if live[2] != shape:
        raise LayoutMismatch(f"the checkpoint holds shape {list(shape)}, the state {list(live[2])}")
    if live[1] != dtype:
        raise LayoutMismatch(f"the checkpoint holds dtype {dtype}, the state {live[1]}")
    _check_writable(target)


def memory_range(value: Any) -> tuple[str, int, int]:
    """Return where the elements of a tensor lie: a device, the first address, and the address after the last."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        start, end = numpy.lib.array_utils.byte_bounds(value)
        return "cpu", start, end
    if is_meta(value):
        return "meta", id(value), id(value) + 1
    plain = value.detach()
    start = plain.data_ptr()
    last = 1 + sum(map(mul, (length - 1 for length in plain.shape), plain.stride()))
    return str(plain.device), start, start + last * plain.itemsize
