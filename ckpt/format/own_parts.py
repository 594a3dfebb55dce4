"""A rank's own part of a state (see ``state.own_part``), and the whole state that it makes with another rank's.

This module needs neither torch nor h5py: the agent uses it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import UNSET

from resilio_hpc.ckpt.format.manifest import Count, RankTable, TensorRecord, blocks
from resilio_hpc.ckpt.state.parts_held import group_of
from resilio_hpc.ckpt.state.paths import LEFT_OUT
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c


class OwnTensor(msgspec.Struct, frozen=True, array_like=True):
    """A small tensor of one rank, described as in ``TensorRecord``. No data: its device rebuilds it."""

    path: str
    kind: str
    dtype: str
    shape: tuple[Count, ...]
    data: bytes


class OwnPart(msgspec.Struct, frozen=True, array_like=True):
    """What is one rank's own. ``outline``: its tree, in JSON, without tensors and torch's objects.

    ``group`` and ``replicas``: see ``state.parts_held``.
    """

    outline: bytes
    tensors: tuple[OwnTensor, ...]
    group: str = ""
    replicas: bytes = b""


_decoder = msgspec.msgpack.Decoder(OwnPart)


def decode_part(data: bytes) -> OwnPart:
    """Return a rank's own part. Raises CorruptCheckpoint."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"what is a rank's own cannot be read: {error}") from error


def table_group(table: RankTable) -> str | None:
    """Return the name of the ranks with the same parts of tensors; None where there are no such parts."""
    if table.group is not UNSET:
        return table.group
    parts = [(one.path, one.shape, one.slab) for one in table.tensors if one.slab is not None]
    return group_of((path, shape, slab.global_shape, slab.start) for path, shape, slab in parts) if parts else None


def with_own(table: RankTable, part: OwnPart, at: int) -> tuple[list[TensorRecord], bytes]:
    """Return a table's records in which the tensors of ``part`` lie behind ``at``, and the bytes there.

    A tensor that the table does not have is one of its others, too, under another path. Raises CorruptCheckpoint where
    one is described otherwise.
    """
    own = {tensor.path: tensor for tensor in part.tensors}
    records, data = [], b""
    for record in _with_replicas(table, part):
        tensor = own.pop(record.path, None)
        if tensor is None:
            records.append(record)
            continue
        size = len(tensor.data) or record.size_bytes
        if (record.kind, record.dtype, record.shape, record.size_bytes) != (
            tensor.kind, tensor.dtype, tensor.shape, size,
        ):  # fmt: skip
            raise CorruptCheckpoint(f"{record.path}: this rank's tensor is another one than the other rank's")
        if not tensor.data:
            records.append(record)
            continue
        data += bytes(-(at + len(data)) % 64)
        checksums = tuple(crc32c(tensor.data[start : start + size]) for start, size in blocks(len(tensor.data)))
        records.append(msgspec.structs.replace(record, offset=at + len(data), checksums=checksums))
        data += tensor.data
    return records, data


def _with_replicas(table: RankTable, part: OwnPart) -> list[TensorRecord]:
    """Return a table's records; parts of tensors have the numbers of the rank's own replicas."""
    numbers, records = iter(part.replicas), []
    for record in table.tensors:
        number = next(numbers, None) if record.slab is not None else None
        if number is not None and record.slab is not None:
            record = msgspec.structs.replace(record, slab=msgspec.structs.replace(record.slab, replica=number))
        records.append(record)
    return records


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
