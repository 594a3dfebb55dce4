"""A step's state as torch.save and DCP take it: torch tensors without content yet, and plain Python values."""

from __future__ import annotations

import datetime
import io
import pathlib
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.state import containers, tensors
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import library

_AS_TEXT = (
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    Decimal,
    Fraction,
    uuid.UUID,
    range,
    slice,
    type(...),
)


@dataclass(frozen=True)
class TorchState:
    """The state. ``tensors``: by number, with untouched memory. ``notes``: on conversions."""

    state: Any
    tensors: list[Any]
    notes: list[str]


def torch_state(whole: WholeState) -> TorchState:
    """Return a step's state as torch saves it.

    Raises UsageError for what torch's files cannot hold, CorruptCheckpoint.
    """
    library("torch", "writing torch files and DCP folders")
    _check_dtypes(whole)
    made = []
    for tensor in whole.tensors:
        tensors.check_description("torch", tensor.torch_name, tensor.shape, tensor.size_bytes)
        made.append(tensors.empty("torch", tensor.torch_name, tensor.shape))
    converted: Counter[str] = Counter()
    converted["numpy arrays made torch tensors"] = sum(tensor.kind == "numpy" for tensor in whole.tensors)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return made[leaf.index]
        value, what = _plain(leaf)
        converted[what] += bool(what)
        return value

    state = _with_known_containers(containers.map_leaves(whole.state, convert), converted)
    return TorchState(state, made, [f"{what}: {count}" for what, count in converted.items() if count])


def tensors_of(node: Any) -> Iterator[Any]:
    """Yield the tensors of a state, in its order."""
    import torch

    if isinstance(node, torch.Tensor):
        yield node
    for _, item in containers.parts(node):
        yield from tensors_of(item)


def _check_dtypes(whole: WholeState) -> None:
    import torch

    for dtype in {tensor.torch_name: tensor for tensor in reversed(whole.tensors)}.values():
        try:
            torch.save(torch.empty(0, dtype=tensors.torch_dtype(dtype.torch_name)), io.BytesIO())
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{dtype.path} has dtype {dtype.torch_name}, which torch cannot save") from error


_KNOWN: dict[Any, Any] = {deque: list, defaultdict: dict}


def _with_known_containers(node: Any, converted: Counter[str]) -> Any:
    """Return the state in dicts, lists and tuples, the only containers that torch.load makes with weights_only."""
    if not containers.is_container(node):
        return node
    kind: Any = _KNOWN.get(type(node), type(node))
    if kind is not type(node):
        converted[f"{type(node).__name__}s made {kind.__name__}s"] += 1
    if isinstance(node, dict):
        values = {key: _with_known_containers(item, converted) for key, item in node.items()}
        return values if kind is dict else containers.alike_dict(node, values)
    if containers.holds_scalars_only(node):
        return kind(node)
    return kind(_with_known_containers(item, converted) for item in node)


def _plain(value: Any) -> tuple[Any, str]:
    """Return the value as torch.load with weights_only reads it, and a note on the conversion."""
    import numpy

    if isinstance(value, io.BytesIO):
        return value.getvalue(), "streams made bytes"
    if isinstance(value, _AS_TEXT):
        return str(value), "paths, dates, ranges and exact numbers made strings"
    if isinstance(value, frozenset):
        return set(value), "frozensets made sets"
    if isinstance(value, numpy.dtype):
        return value.str, "numpy dtypes made strings"
    if isinstance(value, numpy.generic):
        plain = value.item()
        if isinstance(plain, bool | int | float | complex | str | bytes):
            return plain, "numpy scalars made Python values"
        raise UsageError(f"torch's files cannot hold a numpy scalar of dtype {value.dtype}; choose safetensors")
    return value, ""
