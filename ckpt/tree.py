"""Plain values as JSON that restores types exactly; tensors are left out and numbered.

JSON has fewer types than Python, so everything that it lacks becomes an object with one key that begins with ``$``
(``{"$tuple": […]}``, ``{"$bytes": "base64"}``). Nothing in it is code: decoding builds values of the types named in
this module and no others.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from resilio_hpc.ckpt import overlap, tensors
from resilio_hpc.ckpt.slab import Slab
from resilio_hpc.ckpt.tensors import Leaf
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

MAX_DEPTH = 200
_EXACT_IN_JSON = 1 << 53
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON would join two of them to one character


@dataclass(frozen=True)
class TensorRef:
    """Stands for tensor number ``index`` of the table, in a decoded tree."""

    index: int


@dataclass(frozen=True)
class Flattened:
    """A state taken apart: its JSON tree, the tensors in the order of their numbers, and the optimizers in it."""

    tree: bytes
    leaves: tuple[Leaf, ...]
    optimizers: tuple[Any, ...] = ()


def flatten(state: Any) -> Flattened:
    """Take ``state`` apart. Objects with state_dict and load_state_dict stand for their state_dict().

    The same tensor at two places (tied weights) is stored once. Raises UsageError, with the place, for a value that a
    checkpoint cannot hold.
    """
    encoder = _Encoder()
    node = encoder.encode(state, ())
    text = json.dumps(node, separators=(",", ":")).encode("ascii")
    return Flattened(text, tuple(encoder.leaves), tuple(encoder.optimizers))


def decode(tree: bytes) -> Any:
    """The state with a TensorRef in each tensor's place. Raises CorruptCheckpoint."""
    try:
        return _decode(json.loads(tree))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error, OverflowError) as error:
        raise CorruptCheckpoint(f"the tree of plain values cannot be read: {error}") from error


def encode(decoded: Any) -> bytes:
    """The JSON text of which ``decode`` made a tree, or would. Raises UsageError for a value that it cannot hold."""
    return json.dumps(_RefEncoder().encode(decoded, ()), separators=(",", ":")).encode("ascii")


def map_leaves(node: Any, change: Callable[[Any], Any]) -> Any:
    """A decoded tree in which ``change`` was applied to everything that is no dict, list or tuple."""
    if isinstance(node, dict):
        made = type(node)({key: map_leaves(item, change) for key, item in node.items()})
        if hasattr(node, "_metadata"):
            made._metadata = node._metadata  # type: ignore[attr-defined]
        return made
    if type(node) in (list, tuple):
        return type(node)([map_leaves(item, change) for item in node])
    return change(node)


def replaced(decoded: Any, by: Callable[[TensorRef], Any]) -> Any:
    """A decoded tree with something else for each tensor."""
    return map_leaves(decoded, lambda leaf: by(leaf) if isinstance(leaf, TensorRef) else leaf)


def renumber(decoded: Any, by: int) -> Any:
    """A decoded tree whose tensors have numbers higher by so many."""
    return replaced(decoded, lambda ref: TensorRef(ref.index + by))


def refs(node: Any) -> Iterator[TensorRef]:
    """All tensors of a decoded tree."""
    if isinstance(node, TensorRef):
        yield node
    elif isinstance(node, dict | list | tuple):
        for item in node.values() if isinstance(node, dict) else node:
            yield from refs(item)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, TensorRef]]:
    """All tensors of a decoded tree, each with its path as ``flatten`` names it."""
    if isinstance(node, TensorRef):
        yield _joined(path), node
    elif isinstance(node, dict | list | tuple):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(item, (*path, key))


NOTHING: Final = object()


def look_up(node: Any, path: Sequence[Any]) -> Any:
    """What a decoded tree has at a path; NOTHING if it has no such place."""
    for key in path:
        numbered = isinstance(node, list | tuple) and type(key) is int and key < len(node)
        if not numbered and not (isinstance(node, dict) and key in node):
            return NOTHING
        node = node[key]
    return node


def has_state(value: Any) -> bool:
    """Is ``value`` an object that is saved as its state_dict() (module, optimizer, scheduler, scaler, loader)?"""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def component(key: Any) -> str:
    """One step of a path, unique among the keys of one dict; a legal name of an HDF5 link."""
    if type(key) is str:
        return _text_component(key)
    if type(key) is int:
        return str(key)
    return f"${type(key).__name__}:" + quote(repr(key), safe="")


@lru_cache(1 << 16)  # every save asks for the same ones
def _text_component(key: str) -> str:
    if key == "":
        return "$empty"
    if re.fullmatch(r"-?[0-9]+|\.\.?", key):  # the int 0 and the string "0" must differ; . is no name in HDF5
        return f"%{ord(key[0]):02X}" + key[1:]
    return quote(key, safe=" .:,;+=@()[]{}<>!#&'*-_~^|", errors="surrogatepass")


def _joined(path: tuple[Any, ...]) -> str:
    return "/".join(component(key) for key in path) or "value"


def place(path: tuple[Any, ...]) -> str:
    """A path as people read it in a message."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.optimizers: list[Any] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind is dict or kind is OrderedDict or kind is Counter:
            return self._mapping(value, path)
        if kind is list or kind is tuple:
            self._check_depth(path)
            items = [self.encode(item, (*path, position)) for position, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if tensors.is_tensor(value) or kind is Slab:
            return {"$tensor": self._number(value, path)}
        if has_state(value):
            self._check_depth(path)
            if overlap.is_optimizer(value):
                self.optimizers.append(value)
            return self.encode(value.state_dict(), path)
        return _encode_plain(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        self._check_depth(path)
        if type(value) is dict and all(_is_json_key(key) for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        items = [[_encode_key(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
        if type(value) is OrderedDict:
            metadata = getattr(value, "_metadata", None)  # torch modules keep their buffers' versions there
            extra = {} if metadata is None else {"metadata": self.encode(dict(metadata), (*path, "_metadata"))}
            return {"$odict": items, **extra}
        return {"$counter" if type(value) is Counter else "$dict": items}

    def _number(self, value: Any, path: tuple[Any, ...]) -> int:
        try:
            leaf = tensors.describe(value, _joined(path))
        except UsageError as error:
            raise UsageError(f"{place(path)}: {error}") from error
        if leaf.identity is not None and leaf.identity in self._seen:
            return self._seen[leaf.identity]
        number = len(self.leaves)
        self.leaves.append(leaf)
        if leaf.identity is not None:
            self._seen[leaf.identity] = number
        return number

    def _check_depth(self, path: tuple[Any, ...]) -> None:
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{place(path[:4])}…: nested more than {MAX_DEPTH} deep; does the state contain itself?")


class _RefEncoder(_Encoder):
    """Of a tree that was decoded: its tensors are numbers already."""

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        return {"$tensor": value.index} if type(value) is TensorRef else super().encode(value, path)


def _is_json_key(key: Any) -> bool:
    return type(key) is str and not key.startswith("$") and (key.isascii() or not _SURROGATE.search(key))


def _encode_key(key: Any, path: tuple[Any, ...]) -> Any:
    if type(key) is tuple:
        return {"$tuple": [_encode_key(item, path) for item in key]}
    return _encode_plain(key, path)


def _encode_plain(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return {"$str": value.encode("utf-8", "surrogatepass").hex()} if _SURROGATE.search(value) else value
    if kind is int:
        return value if -_EXACT_IN_JSON < value < _EXACT_IN_JSON else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": [_encode_key(item, path) for item in sorted(value, key=repr)]}
    return _encode_library_value(value, path)


def _encode_library_value(value: Any, path: tuple[Any, ...]) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if type(value) is torch.Size:
            return {"$size": list(value)}
        if type(value) is torch.dtype:
            return {"$torch_dtype": str(value).removeprefix("torch.")}
        if type(value) is torch.device:
            return {"$device": str(value)}
    if numpy is not None:
        if isinstance(value, numpy.dtype) and value.kind not in "OV":
            return {"$numpy_dtype": value.str}
        if isinstance(value, numpy.generic) and value.dtype.kind not in "OV":
            return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
    kind = type(value)
    raise UsageError(
        f"{place(path)}: a checkpoint cannot hold a {kind.__module__}.{kind.__qualname__}; it holds tensors, arrays, "
        "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, and objects with state_dict()"
    )


def _decode(node: Any) -> Any:
    if isinstance(node, list):
        return [_decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in node.items()}
    if tag == "$odict":
        return _decode_ordered(node)
    return _DECODERS[tag](node[tag])


def _decode_ordered(node: dict[str, Any]) -> OrderedDict[Any, Any]:
    ordered: OrderedDict[Any, Any] = OrderedDict(_pairs(node["$odict"]))
    if "metadata" in node:
        ordered._metadata = OrderedDict(_decode(node["metadata"]))  # type: ignore[attr-defined]
    return ordered


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(_decode(key), _decode(value)) for key, value in items]


def _tensor(index: Any) -> TensorRef:
    if type(index) is not int or index < 0:
        raise ValueError(f"tensor number {index!r}")
    return TensorRef(index)


def _torch_dtype(name: str) -> Any:
    return tensors.torch_dtype(name)


def _device(name: str) -> Any:
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _size(dimensions: list[int]) -> Any:
    import torch

    return torch.Size(dimensions)


def _scalar(item: list[str]) -> Any:
    import numpy

    dtype, data = tensors.numpy_dtype(item[0]), _base64(item[1])
    return numpy.frombuffer(data, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tensor": _tensor,
    "$tuple": lambda items: tuple(_decode(item) for item in items),
    "$dict": lambda items: dict(_pairs(items)),
    "$counter": lambda items: Counter(dict(_pairs(items))),
    "$str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "$bytes": _base64,
    "$bytearray": lambda text: bytearray(_base64(text)),
    "$set": lambda items: {_decode(item) for item in items},
    "$frozenset": lambda items: frozenset(_decode(item) for item in items),
    "$size": _size,
    "$torch_dtype": _torch_dtype,
    "$device": _device,
    "$numpy_dtype": lambda text: tensors.numpy_dtype(text),
    "$scalar": _scalar,
    "$state": _decode,  # beside it: see dcp_names
}
