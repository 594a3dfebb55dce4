"""A nested state as JSON text that restores types exactly; tensors are left out and numbered.

Containers are here, their values in ``plain_values``. ``decoded_tree`` reads the text back.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilio_hpc.ckpt.state import containers, overlap, plain_values, tensors
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.decoded_tree import TensorRef, decode
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.module_names import fsdp_modules, parameter_names
from resilio_hpc.ckpt.state.paths import joined, place
from resilio_hpc.ckpt.state.plain_values import SCALARS
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

MAX_DEPTH = 100
"""So that it can be read in a deep stack of calls, too."""
_MANY = 50  # fewer are faster one by one


@dataclass(frozen=True)
class Flattened:
    """A state taken apart: its JSON tree, the tensors in the order of their numbers, and the optimizers in it.

    ``kinds``: types of the values, and dtypes of the tensors."""

    tree: bytes
    leaves: tuple[Leaf, ...]
    optimizers: tuple[Any, ...] = ()
    kinds: frozenset[Any] = frozenset()


def _state_dict(value: Any) -> Any:
    return value.state_dict()


def flatten(state: Any, state_of: Callable[[Any], Any] = _state_dict) -> Flattened:
    """Take ``state`` apart. Objects with state_dict and load_state_dict stand for what ``state_of`` gives.

    The same tensor at two places (tied weights) is stored once. Raises UsageError, with the place, for a value that a
    checkpoint cannot hold.
    """
    encoder = Encoder(state_of)
    node = encoder.encode(state, ())
    if encoder.parameters:
        node = {"$state": node, "parameters": encoder.parameters, "names": encoder.names()}
    return Flattened(text(node), tuple(encoder.leaves), tuple(encoder.optimizers), frozenset(encoder.kinds))


def text(node: Any) -> bytes:
    """Return the JSON text of a node."""
    return json.dumps(node, separators=(",", ":")).encode("ascii")


def encode(decoded: Any) -> bytes:
    """Return the JSON text from which ``decode`` made a tree, or would.

    Raises UsageError for a value that it cannot hold.
    """
    return text(_RefEncoder().encode(decoded, ()))


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
            if text(one[key]) != text(other[key]):
                return _first_difference(one[key], other[key], f"{at}[{key!r}]")
    return at


def has_state(value: Any) -> bool:
    """Return whether ``value`` is saved as its state_dict() (module, optimizer, scheduler, scaler, loader)."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


class Encoder:
    """Makes the JSON node of a state, and collects its tensors and optimizers."""

    def __init__(self, state_of: Callable[[Any], Any] = _state_dict) -> None:
        self._state_of = state_of
        self.leaves: list[Leaf] = []
        self.optimizers: list[Any] = []
        self.parameters: list[Any] = []
        self._modules: list[tuple[tuple[Any, ...], Any]] = []
        self.kinds: set[Any] = set()
        self._seen: dict[tuple[Any, ...], int] = {}
        self._shards: list[FlatSlab] = []

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the node of ``value``, which is at ``path``. Raises UsageError."""
        kind = type(value)
        if kind in SCALARS:
            return plain_values.encode(value)
        if kind in containers.DICTS:
            return self._mapping(value, path)
        if kind in containers.SEQUENCES:
            return self._sequence(value, path)
        if tensors.is_tensor(value) or kind is Slab:
            number = self._number(value, path)
            return TensorRef(number, self.leaves[number].strides).node
        if kind is FlatSlab:  # the tree has its first part; the table has all, under the same path
            return {"$tensor": self._number_flat(value, path)}
        if kind is AnyLayout:
            return self.encode(value.saved, path)
        if has_state(value):
            return self._object(value, path)
        self.kinds.add(kind)
        return _plain(value, path)

    def names(self) -> list[Any]:
        """Return, for each optimizer, the names that its parameters have in the modules of the state, or None."""
        return [parameter_names(self._modules, optimizer) for optimizer in self.optimizers]

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
        if hasattr(value, "named_parameters"):
            self._modules.append((path, value))
        check_no_fsdp1(value, path)
        state = self._state_of(value)
        if has_state(state):
            raise UsageError(
                f"{place(path)}: state_dict() of a {plain_values.name_of(type(value))} gives another object that has "
                "one, and not what is in it"
            )
        return self.encode(state, path)

    def _number(self, value: Any, path: tuple[Any, ...]) -> int:
        try:
            leaf = tensors.describe(value, joined(path))
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

    def _number_flat(self, value: FlatSlab, path: tuple[Any, ...]) -> int:
        """Return the number of a shard's first part. The same object elsewhere is the same, also without elements."""
        key = "flat", id(value)
        if key not in self._seen:
            first, *_ = [self._number(part, path) for part in value.parts()]
            self._seen[key] = first
            self._shards.append(value)  # so that no other object gets its id
        return self._seen[key]

    def _check_depth(self, path: tuple[Any, ...]) -> None:
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{place(path[:4])}…: nested more than {MAX_DEPTH} deep; does the state contain itself?")


class _RefEncoder(Encoder):
    """Encodes a tree that was decoded: its tensors are numbers already."""

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        return value.node if type(value) is TensorRef else super().encode(value, path)


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


def check_no_fsdp1(value: Any, path: tuple[Any, ...]) -> None:
    """Raise UsageError for a module with FSDP1 in it: its state_dict() gathers all, and needs all ranks for that."""
    if next(fsdp_modules(value), None) is not None:
        raise UsageError(
            f"{place(path)}: a model under FullyShardedDataParallel is saved by ckpt.fsdp_state(model, optimizer), "
            "which gathers nothing; or use fully_shard (FSDP2), whose modules are saved as they are"
        )


def _shape_of(parameter: Any) -> list[int] | None:
    try:
        return list(parameter.shape)
    except RuntimeError:  # of a lazy module
        return None
