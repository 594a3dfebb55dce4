"""The tensors of a state that replicas must have alike, divided into equal parts: one for each step of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from resilio_hpc.ckpt.state.overlap import is_optimizer
from resilio_hpc.ckpt.state.watched import is_module, torch_objects
from resilio_hpc.native import crc32c
from resilio_hpc.train.validation.tensor_digest import bytes_of, combined, digest_of, size_of

_ALIGNED = 64  # bytes
_LABEL = 96  # characters

Values = list[int | torch.Tensor]


@dataclass(frozen=True)
class ByteView:
    """The bytes of a tensor, to be read again and again: to make a view takes longer than to digest a small tensor."""

    data: memoryview
    address: int
    storage_bytes: int

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor still has that memory, as far as it was: storages can be freed and replaced."""
        return tensor.data_ptr() == self.address and tensor.untyped_storage().nbytes() == self.storage_bytes


@dataclass(frozen=True)
class DigestPiece:
    """Bytes ``start`` … ``stop - 1`` of a tensor. ``view``: all its bytes, where they lie on the CPU in one row."""

    tensor: torch.Tensor
    name: str
    start: int
    stop: int
    view: ByteView | None

    def digest(self) -> int | torch.Tensor:
        """Return the digest, as ``digest_of`` does."""
        view = self.view
        if view is not None and view.is_of(self.tensor):
            return crc32c(view.data[self.start : self.stop])
        return digest_of(self.tensor, self.start, self.stop)


@dataclass(frozen=True)
class DigestPlan:
    """``parts``: pieces of about the same size together; ``mark``: equal where names, types, and sizes are.

    ``tensors``: what tells whether the state still has the same ones.
    """

    parts: tuple[tuple[DigestPiece, ...], ...]
    mark: int
    tensors: tuple[tuple[int, int], ...]

    def digest(self, part: int) -> Values:
        """Return what ``folded`` makes one number of: the digest of each piece."""
        return [piece.digest() for piece in self.parts[part]]

    def labels(self) -> tuple[str, ...]:
        """Return for each part the names of its tensors, for people."""
        return tuple(_label([piece.name for piece in part]) for part in self.parts)


def folded(found: list[Values]) -> list[int]:
    """Return one number for each part. Waits for each device once."""
    on_device = [value for values in found for value in values if isinstance(value, torch.Tensor)]
    fetched: dict[int, int] = {}
    for device in {value.device for value in on_device}:
        here = [value for value in on_device if value.device == device]
        fetched.update(zip(map(id, here), torch.stack(here).tolist(), strict=True))
    return [
        combined([fetched[id(value)] if isinstance(value, torch.Tensor) else value for value in values])
        for values in found
    ]


def plan_of(state: Any, parts: int, before: DigestPlan | None = None) -> DigestPlan:
    """Return the plan for the parameters and optimizer states of ``state``; those of no torch object are left out.

    It is ``before``, the plan of earlier, where the state still has the same tensors.
    """
    named = list(replicated_tensors(state))
    tensors = tuple((id(tensor), 0 if hasattr(tensor, "to_local") else tensor.data_ptr()) for _, tensor in named)
    if before is not None and before.tensors == tensors and len(before.parts) == parts:
        return before
    sizes = [size_of(tensor) for _, tensor in named]
    share = max(_ALIGNED, _aligned(sum(map(_aligned, sizes)) // parts))
    filled: list[list[DigestPiece]] = [[] for _ in range(parts)]
    begin = 0  # of the tensor, where all tensors stand in one row
    for (name, tensor), size in zip(named, sizes, strict=True):
        start, view = 0, _view(tensor)
        while start < size:
            part = min((begin + start) // share, parts - 1)
            stop = size if part == parts - 1 else min(size, (part + 1) * share - begin)
            filled[part].append(DigestPiece(tensor, name, start, stop, view))
            start = stop
        begin += _aligned(size)
    layout = ";".join(f"{name}:{tensor.dtype}:{size}" for (name, tensor), size in zip(named, sizes, strict=True))
    return DigestPlan(tuple(map(tuple, filled)), crc32c(layout.encode()), tensors)


def _view(tensor: torch.Tensor) -> ByteView | None:
    if hasattr(tensor, "to_local") or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return ByteView(bytes_of(tensor), tensor.data_ptr(), tensor.untyped_storage().nbytes())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def replicated_tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors: parameters of modules, then what optimizers hold, each tensor once.

    Buffers are left out: running statistics are each rank's own in most programs.
    """
    objects = torch_objects(state)
    names: dict[int, str] = {}
    seen: set[int] = set()
    for module in filter(is_module, objects):
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), name)
    for optimizer in filter(is_optimizer, objects):
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"parameter {place} of group {number}")
    for module in filter(is_module, objects):
        yield from _once([(names[id(one)], one) for one in module.parameters()], seen)
    for optimizer in filter(is_optimizer, objects):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        yield from _once([(names[id(one)], one) for one in held], seen)
        for parameter in held:
            values = optimizer.state.get(parameter, {})
            of = names[id(parameter)]
            yield from _once([(f"{key} of {of}", value) for key, value in _tensors(values)], seen)


def _once(found: list[tuple[str, Any]], seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in found:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            if not tensor.is_meta and tensor.layout is torch.strided:
                yield name, tensor


def _tensors(values: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(values, dict):
        yield from ((str(key), value) for key, value in values.items() if isinstance(value, torch.Tensor))


def _label(names: list[str]) -> str:
    """Return ``first … last (7 tensors)``."""
    found = list(dict.fromkeys(names))
    if len(found) < 3:
        return " and ".join(found)[:_LABEL]
    return f"{found[0]} … {found[-1]} ({len(found)} tensors)"[:_LABEL]
