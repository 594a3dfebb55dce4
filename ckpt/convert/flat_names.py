"""Names for the tensors of a nested state, and the JSON text that maps the names back to the state."""

from __future__ import annotations

from typing import Any

import msgspec

from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.state import containers, decoded_tree, tree
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    """The text. ``tree``: of the state, as in a checkpoint.

    ``names``: of its tensors, by their numbers. ``arrays``: the numbers of those that are numpy arrays.
    """

    tree: msgspec.Raw
    names: list[str]
    arrays: list[int]


def names_of(state: Any) -> dict[str, int]:
    """Return the number of the tensor at each place of a decoded state, by its keys and positions joined with dots.

    A tensor at two places has two names. Raises UsageError for two tensors of one name, and for one that is no text.
    """
    found: dict[str, int] = {}

    def collect(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, TensorRef):
            name = ".".join(map(str, path)) if path else "state"
            if name in found:
                raise UsageError(
                    f"two tensors would have the name {name!r}, since keys are joined with dots; choose another format"
                )
            if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
                raise UsageError(f"a tensor's name is no text: {name!r}; choose another format")
            found[name] = node.index
        for key, item in containers.parts(node):
            collect(item, (*path, key))

    collect(state, ())
    return found


def text_of(whole: WholeState) -> bytes:
    """Return the text for ``state_from``. Raises UsageError."""
    by_number = {number: name for name, number in reversed(names_of(whole.state).items())}
    names = [by_number[number] for number in range(len(whole.tensors))]
    arrays = [number for number, tensor in enumerate(whole.tensors) if tensor.kind == "numpy"]
    return msgspec.json.encode(_Text(msgspec.Raw(tree.encode(whole.state)), names, arrays))


def state_from(text: bytes, tensors: dict[str, Any]) -> Any:
    """Return the state, with the torch tensors that the text names. Raises CorruptCheckpoint."""
    try:
        found = msgspec.json.decode(text, type=_Text)
        arrays = {number: tensors[found.names[number]].numpy() for number in found.arrays}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError) as error:
        raise CorruptCheckpoint(f"the plain values beside the tensors cannot be read: {error}") from error

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        name = found.names[leaf.index] if leaf.index < len(found.names) else None
        if name not in tensors:
            raise CorruptCheckpoint(f"the plain values ask for tensor {leaf.index} ({name!r}), which is not there")
        return arrays[leaf.index] if leaf.index in arrays else tensors[name]

    return containers.map_leaves(decoded_tree.decode(bytes(found.tree)), put)
