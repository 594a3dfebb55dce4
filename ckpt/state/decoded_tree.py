"""The tree of a saved state, read from its JSON text: containers and plain values, and a number for each tensor.

Nothing of it is code: decoding builds values of the types named here and in ``plain_values``, and no others.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from resilio_hpc.ckpt.state import containers, plain_values
from resilio_hpc.ckpt.state.containers import map_leaves
from resilio_hpc.ckpt.state.paths import joined
from resilio_hpc.ckpt.state.plain_values import SCALARS
from resilio_hpc.core.errors import CorruptCheckpoint

Shapes = list[list[int] | None]


@dataclass(frozen=True)
class TensorRef:
    """Stands for tensor number ``index`` of the table, in a decoded tree.

    ``strides``: see ``tensors.dense_strides``.
    """

    index: int
    strides: tuple[int, ...] = ()

    @property
    def node(self) -> dict[str, Any]:
        """Return its JSON node."""
        return {"$tensor": self.index, **({"strides": list(self.strides)} if self.strides else {})}


def decode(tree: bytes) -> Any:
    """Return the state with a TensorRef in each tensor's place. Raises CorruptCheckpoint."""
    return read(tree)[0]


class Parameters(NamedTuple):
    """The parameters of a saved optimizer, in their order. ``names``: in modules of the state, None where not known."""

    shapes: Shapes
    names: list[str] | None


def read(tree: bytes) -> tuple[Any, dict[tuple[Any, ...], Parameters]]:
    """Do as ``decode``; return also the parameters of each optimizer, by its path. Raises CorruptCheckpoint."""
    try:
        node = json.loads(tree)
        beside = node if isinstance(node, dict) and next(iter(node), "") == "$state" else {}
        known = zip_longest(beside.get("parameters", ()), beside.get("names", ()))
        return _decode(node), {
            tuple(map(_decode, path)): Parameters(_shapes(shapes), _names(names)) for (path, shapes), names in known
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptCheckpoint(f"the tree of plain values cannot be read: {error}") from error
    except ArithmeticError as error:
        raise CorruptCheckpoint(f"the tree of plain values has a number that is none: {error!r}") from error


def _shapes(node: Any) -> Shapes:
    if any(shape is not None and any(type(length) is not int for length in shape) for shape in node):
        raise ValueError("the shapes of an optimizer's parameters are none")
    return list(node)


def _names(node: Any) -> list[str] | None:
    if node is not None and not all(type(name) is str for name in node):
        raise ValueError("the names of an optimizer's parameters are none")
    return node if node is None else list(node)


def replaced(decoded: Any, by: Callable[[TensorRef], Any]) -> Any:
    """Return a decoded tree with something else for each tensor."""
    return map_leaves(decoded, lambda leaf: by(leaf) if isinstance(leaf, TensorRef) else leaf)


def renumber(decoded: Any, by: int) -> Any:
    """Return a decoded tree whose tensors have numbers higher by so many."""
    return replaced(decoded, lambda ref: TensorRef(ref.index + by, ref.strides))


def refs(node: Any) -> Iterator[TensorRef]:
    """Yield all tensors of a decoded tree."""
    if isinstance(node, TensorRef):
        yield node
    else:
        for _, item in containers.parts(node):
            yield from refs(item)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, TensorRef]]:
    """Yield all tensors of a decoded tree, each with its path as ``flatten`` names it."""
    if isinstance(node, TensorRef):
        yield joined(path), node
    else:
        for key, item in containers.parts(node):
            yield from places(item, (*path, key))


def _decode(node: Any) -> Any:
    if isinstance(node, list):
        return node if set(map(type, node)) <= SCALARS else [_decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        if set(map(type, node.values())) <= SCALARS:
            return node
        return {key: _decode(item) for key, item in node.items()}
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](node)
    return plain_values.decode(tag, node[tag], _decode)


def _ordered(node: dict[str, Any]) -> OrderedDict[Any, Any]:
    ordered: OrderedDict[Any, Any] = OrderedDict(_pairs(node["$odict"]))
    if "metadata" in node:
        ordered._metadata = OrderedDict(_decode(node["metadata"]))  # type: ignore[attr-defined]
    return ordered


def _counter(node: dict[str, Any]) -> Counter[Any]:
    return Counter(dict(_pairs(node["$counter"])))


def _defaultdict(node: dict[str, Any]) -> defaultdict[Any, Any]:
    factory = plain_values.BUILTIN_TYPES[node["factory"]] if node["factory"] else None
    return defaultdict(factory, _pairs(node["$defaultdict"]))


def _deque(node: dict[str, Any]) -> deque[Any]:
    length = node["maxlen"]
    if length is not None and type(length) is not int:
        raise ValueError("the length of a deque is none")
    return deque(_decode(node["$deque"]), length)


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if set(map(type, items)) <= {list} and set(map(type, chain.from_iterable(items))) <= SCALARS:
        return items
    return [(_decode(key), _decode(value)) for key, value in items]


def _tensor(node: dict[str, Any]) -> TensorRef:
    index, strides = node["$tensor"], node.get("strides", ())
    if type(index) is not int or index < 0:
        raise ValueError(f"tensor number {index!r}")
    if any(type(step) is not int for step in strides):
        raise ValueError(f"the strides of tensor {index} are none")
    return TensorRef(index, tuple(strides))


_CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$tensor": _tensor,
    "$tuple": lambda node: tuple(_decode(node["$tuple"])),
    "$dict": lambda node: dict(_pairs(node["$dict"])),
    "$odict": _ordered,
    "$counter": _counter,
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$state": lambda node: _decode(node["$state"]),  # beside it: see ``read`` and dcp_names
}
