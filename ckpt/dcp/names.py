"""Names that ``torch.distributed.checkpoint`` gives to the places of a state, and the values that it takes whole.

It takes a state apart down to tensors; a list that holds neither tensors nor dicts is one value, and so is anything but
a list or a dict. A place's name is its path with dots: ``model.layers.0.weight`` (``_nested_dict.py`` of torch).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.core.errors import CorruptCheckpoint

Path = tuple[str | int, ...]
IsTorch = Callable[[TensorRef], bool]
_STATE = "$state"


def name_of(path: Path) -> str:
    """Return the name of a path, as in the keys of a flattened state dict."""
    return ".".join(map(str, path))


def path_of(name: str, planner_data: Any) -> Path:
    """Return the path of a planner's name in the state; the name alone for planners that do not tell."""
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    if isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path) and name_of(path) == name:
        return path
    return (name,)


def places(node: Any, is_torch: IsTorch, values: Collection[str] = (), path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every place of a decoded tree with its content.

    ``values``: names of places that are one value in any case.
    """
    if values and name_of(path) in values:
        yield path, node
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from places(item, is_torch, values, (*path, str(key)))
    elif isinstance(node, list) and not _is_one_value(node, is_torch):
        for number, item in enumerate(node):
            yield from places(item, is_torch, values, (*path, number))
    else:
        yield path, node


def _is_one_value(items: list[Any], is_torch: IsTorch) -> bool:
    for item in items:
        if isinstance(item, dict) or (isinstance(item, list) and not _is_one_value(item, is_torch)):
            return False
        if isinstance(item, TensorRef) and is_torch(item):
            return False
    return True


def mark(tree: bytes, values: Collection[str]) -> bytes:
    """Return a tree that also names places that are one value each, though their content looks otherwise."""
    return b'{"%s":%s,"values":%s}' % (_STATE.encode(), tree, json.dumps(list(values)).encode())


def marked(tree: bytes) -> set[str]:
    """Return these names. Raises CorruptCheckpoint."""
    if not tree.startswith(b'{"%s"' % _STATE.encode()):
        return set()
    try:
        return set(json.loads(tree).get("values", ()))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(f"the tree of plain values cannot be read: {error}") from error
