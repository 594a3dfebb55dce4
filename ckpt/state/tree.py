"""A nested state as JSON text that restores types exactly; tensors are left out and numbered.

Containers are here, their values in ``plain_values``. Nothing of it is code: decoding builds values of the types named
in these modules and no others.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import quote

from resilio_hpc.ckpt.state import containers, overlap, plain_values, tensors
from resilio_hpc.ckpt.state.containers import map_leaves
from resilio_hpc.ckpt.state.plain_values import SCALARS
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

MAX_DEPTH = 100
"""So that it can be read in a deep stack of calls, too."""
_MANY = 50  # fewer are faster one by one
Shapes = list[list[int] | None]


@dataclass(frozen=True)
class TensorRef:
    """Stands for tensor number ``index`` of the table, in a decoded tree."""

    index: int


@dataclass(frozen=True)
class Flattened:
    """A state taken apart: its JSON tree, the tensors in the order of their numbers, and the optimizers in it.

    ``kinds``: types of the values, and dtypes of the tensors."""

    tree: bytes
    leaves: tuple[Leaf, ...]
    optimizers: tuple[Any, ...] = ()
    kinds: frozenset[Any] = frozenset()


def flatten(state: Any) -> Flattened:
    """Take ``state`` apart. Objects with state_dict and load_state_dict stand for their state_dict().

    The same tensor at two places (tied weights) is stored once. Raises UsageError, with the place, for a value that a
    checkpoint cannot hold.
    """
    encoder = _Encoder()
    node = encoder.encode(state, ())
    if encoder.parameters:
        node = {"$state": node, "parameters": encoder.parameters}
    return Flattened(_text(node), tuple(encoder.leaves), tuple(encoder.optimizers), frozenset(encoder.kinds))


def _text(node: Any) -> bytes:
    return json.dumps(node, separators=(",", ":")).encode("ascii")


def decode(tree: bytes) -> Any:
    """Return the state with a TensorRef in each tensor's place. Raises CorruptCheckpoint."""
    return read(tree)[0]


def read(tree: bytes) -> tuple[Any, dict[tuple[Any, ...], Shapes]]:
    """Do as ``decode``; return also, by the path of an optimizer, the shapes of its parameters, in their order.

    Raises CorruptCheckpoint.
    """
    try:
        node = json.loads(tree)
        known = node.get("parameters", []) if isinstance(node, dict) and next(iter(node), "") == "$state" else []
        return _decode(node), {tuple(map(_decode, path)): _shapes(shapes) for path, shapes in known}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptCheckpoint(f"the tree of plain values cannot be read: {error}") from error
    except ArithmeticError as error:
        raise CorruptCheckpoint(f"the tree of plain values has a number that is none: {error!r}") from error


def _shapes(node: Any) -> Shapes:
    if any(shape is not None and any(type(length) is not int for length in shape) for shape in node):
        raise ValueError("the shapes of an optimizer's parameters are none")
    return list(node)


def encode(decoded: Any) -> bytes:
    """Return the JSON text from which ``decode`` made a tree, or would.

    Raises UsageError for a value that it cannot hold.
    """
    return _text(_RefEncoder().encode(decoded, ()))


def check_reads_back(flat: Flattened) -> None:
    """Raise UsageError, with the place, where the flattened state would not be read back unchanged."""
    again = encode(decode(flat.tree))
    if flat.tree.startswith(b'{"$state":'):
        again = b'{"$state":%s,%s' % (again, flat.tree[flat.tree.rindex(b'"parameters":') :])
    if again != flat.tree:
        at = _first_difference(json.loads(flat.tree), json.loads(again), "state")
        raise UsageError(f"{at}: it would not come back as it is")
    for leaf in flat.leaves:
        try:
            tensors.check_description(leaf.kind, leaf.dtype, leaf.shape, leaf.size_bytes)
        except CorruptCheckpoint as error:
            raise UsageError(f"{leaf.path}: it would not come back as it is: {error}") from error


def _first_difference(one: Any, other: Any, at: str) -> str:
    if type(one) is type(other) and isinstance(one, dict | list) and len(one) == len(other):
        keys = one if isinstance(one, dict) else range(len(one))
        for key in keys:
            if key not in other if isinstance(other, dict) else False:
                return at
            if _text(one[key]) != _text(other[key]):
                return _first_difference(one[key], other[key], f"{at}[{key!r}]")
    return at


def replaced(decoded: Any, by: Callable[[TensorRef], Any]) -> Any:
    """Return a decoded tree with something else for each tensor."""
    return map_leaves(decoded, lambda leaf: by(leaf) if isinstance(leaf, TensorRef) else leaf)


def renumber(decoded: Any, by: int) -> Any:
    """Return a decoded tree whose tensors have numbers higher by so many."""
    return replaced(decoded, lambda ref: TensorRef(ref.index + by))


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
        yield _joined(path), node
    else:
        for key, item in containers.parts(node):
            yield from places(item, (*path, key))


def has_state(value: Any) -> bool:
    """Return whether ``value`` is saved as its state_dict() (module, optimizer, scheduler, scaler, loader)."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def component(key: Any) -> str:
    """Return one component of a path, unique among the keys of one dict; a legal name of an HDF5 link."""
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
    """Return a path as people read it in a message."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.optimizers: list[Any] = []
        self.parameters: list[Any] = []
        self.kinds: set[Any] = set()
        self._seen: dict[tuple[Any, ...], int] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return plain_values.encode(value)
        if kind in containers.DICTS:
            return self._mapping(value, path)
        if kind in containers.SEQUENCES:
            return self._sequence(value, path)
        if tensors.is_tensor(value) or kind is Slab:
            return {"$tensor": self._number(value, path)}
        if has_state(value):
            return self._object(value, path)
        self.kinds.add(kind)
        return _plain(value, path)

    def _sequence(self, value: Any, path: tuple[Any, ...]) -> Any:
        self._check_depth(path)
        kind = type(value)
        self.kinds.add(kind)
        if _are_json(value):
            items = list(value)
        else:
            items = [self.encode(item, (*path, position)) for position, item in enumerate(value)]
        if kind is list:
            return items
        return {"$tuple": items} if kind is tuple else {"$deque": items, "maxlen": value.maxlen}

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        self._check_depth(path)
        kind = type(value)
        self.kinds.add(kind)
        simple = _are_json(value.values())
        if kind is dict and all(_is_json_key(key) for key in value):
            return dict(value) if simple else {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if simple and _are_json(value):
            items = list(map(list, value.items()))
        else:
            items = [[self._key(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
        if isinstance(value, OrderedDict):
            metadata = getattr(value, "_metadata", None)  # torch modules keep the versions of their buffers there
            extra = {} if metadata is None else {"metadata": self.encode(dict(metadata), (*path, "_metadata"))}
            return {"$odict": items, **extra}
        if isinstance(value, defaultdict):
            return {"$defaultdict": items, "factory": _factory_name(value.default_factory, path)}
        return {"$counter" if kind is Counter else "$dict": items}

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if type(key) not in SCALARS:
            self.kinds.add(type(key))
        return _plain(key, path, f" as the key {key!r:.80}")

    def _object(self, value: Any, path: tuple[Any, ...]) -> Any:
        self._check_depth(path)
        if overlap.is_optimizer(value):
            self.optimizers.append(value)
            shapes = [_shape_of(parameter) for group in value.param_groups for parameter in group["params"]]
            self.parameters.append([[self._key(key, path) for key in path], shapes])
        state = value.state_dict()
        if has_state(state):
            raise UsageError(
                f"{place(path)}: state_dict() of a {plain_values.name_of(type(value))} gives another object that has "
                "one, and not what is in it"
            )
        return self.encode(state, path)

    def _number(self, value: Any, path: tuple[Any, ...]) -> int:
        try:
            leaf = tensors.describe(value, _joined(path))
        except (UsageError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{place(path)}: {str(error).partition(chr(10))[0]}") from error
        if leaf.identity is not None and leaf.identity in self._seen:
            return self._seen[leaf.identity]
        number = len(self.leaves)
        self.leaves.append(leaf)
        self.kinds.add((leaf.kind, leaf.dtype))
        if leaf.identity is not None:
            self._seen[leaf.identity] = number
        return number

    def _check_depth(self, path: tuple[Any, ...]) -> None:
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{place(path[:4])}…: nested more than {MAX_DEPTH} deep; does the state contain itself?")


class _RefEncoder(_Encoder):
    """Encodes a tree that was decoded: its tensors are numbers already."""

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        return {"$tensor": value.index} if type(value) is TensorRef else super().encode(value, path)


def _are_json(values: Any) -> bool:
    return len(values) > _MANY and plain_values.are_json(values, set(map(type, values)))


def _is_json_key(key: Any) -> bool:
    return type(key) is str and not key.startswith("$") and plain_values.is_json_text(key)


def _plain(value: Any, path: tuple[Any, ...], what: str = "") -> Any:
    try:
        return plain_values.encode(value)
    except UsageError as error:
        raise UsageError(f"{place(path)}{what}: {error}") from error


def _factory_name(factory: Any, path: tuple[Any, ...]) -> str:
    if factory is None:
        return ""
    name = next((name for name, kind in plain_values.BUILTIN_TYPES.items() if kind is factory), None)
    if name is None:
        raise UsageError(
            f"{place(path)}: a defaultdict that makes {getattr(factory, '__qualname__', factory)} cannot be held: "
            "that is code; save dict() of it"
        )
    return name


def _shape_of(parameter: Any) -> list[int] | None:
    try:
        return list(parameter.shape)
    except RuntimeError:  # of a lazy module
        return None


# -- reading -----------------------------------------------------------------------------------------------------------


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


def _tensor(index: Any) -> TensorRef:
    if type(index) is not int or index < 0:
        raise ValueError(f"tensor number {index!r}")
    return TensorRef(index)


_CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$tensor": lambda node: _tensor(node["$tensor"]),
    "$tuple": lambda node: tuple(_decode(node["$tuple"])),
    "$dict": lambda node: dict(_pairs(node["$dict"])),
    "$odict": _ordered,
    "$counter": _counter,
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$state": lambda node: _decode(node["$state"]),  # beside it: see ``read`` and dcp_names
}
