"""The containers that a state is nested in: dict, OrderedDict, Counter, defaultdict, list, tuple and deque."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from resilio_hpc.ckpt.state.plain_values import SCALARS

DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
SEQUENCES = frozenset({list, tuple, deque})


def is_container(node: Any) -> bool:
    """Return whether it is one of these, not of a class derived from them."""
    return type(node) in DICTS or type(node) in SEQUENCES


def holds_scalars_only(node: Any) -> bool:
    """Return whether a container holds only numbers, text and None. Fast for millions of them."""
    return set(map(type, node.values() if isinstance(node, dict) else node)) <= SCALARS


def parts(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or positions of a container with their contents; nothing where they are scalars only."""
    if is_container(node) and not holds_scalars_only(node):
        yield from node.items() if isinstance(node, dict) else enumerate(node)


def alike(node: Any, values: Iterable[Any]) -> Any:
    """Return a new container of the kind of ``node`` (a sequence), with other values."""
    return deque(values, node.maxlen) if type(node) is deque else type(node)(values)


def alike_dict(node: Any, values: dict[Any, Any]) -> Any:
    """Return a new dict of the kind of ``node``, with other values."""
    if type(node) is dict:
        return values
    if type(node) is defaultdict:
        return defaultdict(node.default_factory, values)
    made = type(node)(values)
    if hasattr(node, "_metadata"):
        made._metadata = node._metadata
    return made


def fill_dict(live: Any, values: dict[Any, Any]) -> Any:
    """Give a live dict these items, in their order, and no others; return it."""
    if [*live] != [*values]:
        live.clear()
    for key, value in values.items():  # a Counter's update() would add
        live[key] = value
    return live


def map_leaves(node: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest of containers in which ``change`` was applied to all else.

    A container of scalars only stays the same object.
    """
    if not is_container(node) or holds_scalars_only(node):
        return change(node) if not is_container(node) else node
    if isinstance(node, dict):
        return alike_dict(node, {key: map_leaves(item, change) for key, item in node.items()})
    return alike(node, [map_leaves(item, change) for item in node])


NOTHING: Any = object()


def look_up(node: Any, path: Sequence[Any]) -> Any:
    """Return what a nest of containers has at a path; NOTHING if it has no such place."""
    for key in path:
        numbered = type(node) in SEQUENCES and type(key) is int and key < len(node)
        if not numbered and not (isinstance(node, dict) and key in node):
            return NOTHING
        node = node[key]
    return node
