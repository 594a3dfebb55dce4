"""A micro-batch with the random numbers and buffers of its rank, as bytes for another rank. No pickle.

Batches of all ranks have the same structure; shapes may differ. The receiver's own batch tells the structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from resilio_hpc.ckpt.state import containers

_PLAIN = (bool, int, float, str, bytes, type(None))


class CannotTravel(Exception):
    """Raised for a batch with a value that is neither a tensor nor plain."""


class _Part(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


@dataclass(frozen=True)
class BatchWork:
    """What a rank computes: its batch, and where its generators and buffers stood."""

    batch: Any
    generators: dict[str, Any]
    buffers: Sequence[torch.Tensor]


def packed(work: BatchWork) -> bytes:
    """Return the work as bytes. Raises CannotTravel."""
    leaves = [_pack(leaf) for leaf in _leaves(work.batch)]
    return msgspec.msgpack.encode([leaves, work.generators, [_pack(buffer) for buffer in work.buffers]])


def unpacked(data: bytes, own: BatchWork) -> BatchWork:
    """Return the work of another rank. ``own``: tells structure and devices. Raises CannotTravel where it differs."""
    leaves, generators, buffers = msgspec.msgpack.decode(data)
    if len(leaves) != len(list(_leaves(own.batch))) or len(buffers) != len(own.buffers):
        raise CannotTravel("the batches of two ranks have not the same structure")
    waiting = iter(leaves)
    batch = _rebuilt(own.batch, waiting)
    pairs = zip(buffers, own.buffers, strict=True)
    return BatchWork(batch, generators, [_unpack(found, buffer) for found, buffer in pairs])


def _leaves(node: Any) -> list[Any]:
    if not containers.is_container(node):
        return [node]
    values = node.values() if isinstance(node, dict) else node
    return [leaf for value in values for leaf in _leaves(value)]


def _rebuilt(node: Any, waiting: Any) -> Any:
    if not containers.is_container(node):
        return _unpack(next(waiting), node)
    if isinstance(node, dict):
        return containers.alike_dict(node, {key: _rebuilt(value, waiting) for key, value in node.items()})
    return containers.alike(node, [_rebuilt(value, waiting) for value in node])


def _pack(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return _Part(str(leaf.dtype).removeprefix("torch."), list(leaf.shape), data)
    if type(leaf) not in _PLAIN:
        raise CannotTravel(f"a batch with a {type(leaf).__name__} cannot be sent to another rank")
    return leaf


def _unpack(value: Any, like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return value
    part = msgspec.convert(value, _Part)
    dtype = getattr(torch, part.dtype)
    flat = torch.frombuffer(bytearray(part.data), dtype=dtype) if part.data else torch.empty(0, dtype=dtype)
    return flat.reshape(part.shape).to(like.device)
