"""Outlines: the JSON text of a rank's state without its tensors, and the whole tree that another rank's makes of it.

This module needs neither torch nor h5py: the agent uses it.
"""

from __future__ import annotations

import json
from typing import Any

from resilio_hpc.ckpt.state.paths import LEFT_OUT
from resilio_hpc.core.errors import CorruptCheckpoint


def filled(outlined: bytes, whole: bytes) -> bytes:
    """Return the tree of which ``outlined`` is the outline, and another rank's tree, ``whole``, gives what is left out.

    Raises CorruptCheckpoint where the two do not have the same shape.
    """
    try:
        node, other = json.loads(outlined), json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"the outline of a state cannot be read: {error}") from error
    if isinstance(other, dict) and next(iter(other), "") == "$state":
        return _text({**other, "$state": _filled(node, other["$state"], "state")})
    return _text(_filled(node, other, "state"))


def _filled(node: Any, other: Any, at: str) -> Any:
    if node == LEFT_OUT:
        return other
    if isinstance(node, dict) and _leaves_out(node):
        if not isinstance(other, dict) or node.keys() != other.keys():
            raise CorruptCheckpoint(f"{at}: this rank's state has another shape than the other rank's")
        return {key: _filled(item, other[key], f"{at}[{key!r}]") for key, item in node.items()}
    if isinstance(node, list) and _leaves_out(node):
        if not isinstance(other, list) or len(node) != len(other):
            raise CorruptCheckpoint(f"{at}: this rank's state has another shape than the other rank's")
        pairs = enumerate(zip(node, other, strict=True))
        return [_filled(item, its, f"{at}[{number}]") for number, (item, its) in pairs]
    return node


def _leaves_out(node: Any) -> bool:
    if node == LEFT_OUT:
        return True
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return any(_leaves_out(item) for item in parts if isinstance(item, dict | list))


def _text(node: Any) -> bytes:
    return json.dumps(node, separators=(",", ":")).encode("ascii")
