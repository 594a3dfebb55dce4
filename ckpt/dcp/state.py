"""A process's part of a ``torch.distributed.checkpoint`` save, joined to the state that it was.

The planner has taken the state apart into items, of which this process writes some. The others are described as well,
so that every process's tree is whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from resilio_hpc.ckpt.dcp import names as dcp_names
from resilio_hpc.ckpt.dcp.names import Path
from resilio_hpc.ckpt.dcp.values import value_of
from resilio_hpc.ckpt.state import containers, decoded_tree, tensors, tree
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.core.errors import UsageError

_NUMBER = "0|[1-9][0-9]{0,17}"


def flattened(local: SavePlan | None, final: SavePlan, planner: SavePlanner) -> Flattened:
    """Return the contents of the snapshot.

    ``local``: the items of this process; ``final``: those that it is to write.

    Raises UsageError, with the name, for what a checkpoint cannot hold.
    """
    written = {item.index for item in final.items}
    items: dict[MetadataIndex, WriteItem] = {item.index: item for item in (local.items if local else ())}
    items.update((item.index, item) for item in final.items)
    planner_data = local.planner_data if local else final.planner_data
    slabs: dict[Path, list[Slab]] = {}
    values: dict[Path, Any] = {}
    for index, item in items.items():
        path = dcp_names.path_of(index.fqn, planner_data)
        if item.type is WriteItemType.BYTE_IO:
            values[path] = value_of(planner, item)
        else:
            slabs.setdefault(path, []).append(_slab(item, planner, index in written))
    state = _nested(values | {path: parts[0] for path, parts in slabs.items()})
    for path, value in values.items():
        if path[-3:] == ("param_groups", 0, "params") and isinstance(value, list):
            _mend_optimizer(containers.look_up(state, path[:-3]), numbered=all(type(item) is int for item in value))
    flat = tree.flatten(state)
    tree.check_reads_back(flat)
    return _finish(flat, slabs, values)


def _slab(item: WriteItem, planner: SavePlanner, written: bool) -> Slab:
    assert item.tensor_data is not None  # a tensor always has it
    chunk, whole = item.tensor_data.chunk, tuple(item.tensor_data.size)
    # a part without elements may have a start behind the end
    start = tuple(min(at, length) for at, length in zip(chunk.offsets, whole, strict=True))
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{item.index.fqn}: the planner gives a {type(tensor).__name__} for a tensor")
    try:
        return Slab(tensor, whole, start, 0 if written else 1)
    except UsageError as error:
        raise UsageError(f"{item.index.fqn}: {error}") from error


class _Branch(dict[Any, Any]):
    """A dict or a list of the state under construction."""


def _nested(entries: Mapping[Path, Any]) -> Any:
    root = _Branch()
    for path, value in entries.items():
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
            if type(branch) is not _Branch:
                break
        if type(branch) is not _Branch or path[-1] in branch:
            raise UsageError(f"{dcp_names.name_of(path)}: a place of the state below another value; rename one of them")
        branch[path[-1]] = value
    return _settled(root)


def _settled(node: Any) -> Any:
    if type(node) is not _Branch:
        return node
    made = {key: _settled(item) for key, item in node.items()}
    if not made or any(type(key) is not int for key in made):
        return made
    items = [made.get(number, {}) for number in range(max(made) + 1)]
    # planners drop empty dicts: a list without tensors or dicts in it had one
    reasons = len(made) < len(items) or any(isinstance(item, dict | Slab) for item in node.values())
    return items if reasons else [*items, {}]


def _mend_optimizer(optimizer: Any, numbered: bool) -> None:
    """Undo what the planner does: it drops an empty state, and turns the numbers of parameters into text."""
    state = optimizer.setdefault("state", {})
    if numbered and isinstance(state, dict):
        optimizer["state"] = {int(key) if re.fullmatch(_NUMBER, str(key)) else key: state[key] for key in state}


def _finish(flat: Flattened, slabs: Mapping[Path, Sequence[Slab]], values: Mapping[Path, Any]) -> Flattened:
    leaves = list(flat.leaves)

    def is_torch(ref: TensorRef) -> bool:
        return leaves[ref.index].kind == "torch"

    places = dcp_names.places(decoded_tree.decode(flat.tree), is_torch)
    found = {dcp_names.name_of(path): node for path, node in places}
    for path, parts in slabs.items():
        place = leaves[found[dcp_names.name_of(path)].index].path
        leaves += [tensors.describe(part, place) for part in parts[1:]]
    names = map(dcp_names.name_of, values)
    unlike = [n for n in names if n not in found or (isinstance(found[n], TensorRef) and is_torch(found[n]))]
    text = dcp_names.mark(flat.tree, unlike) if unlike else flat.tree
    described = [replace(leaf, value=None) if leaf.slab and leaf.slab.replica else leaf for leaf in leaves]
    return Flattened(text, tuple(described))
