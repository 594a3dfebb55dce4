"""The few things that a checkpoint needs from torch tensors and numpy arrays, which it sees as bytes.

Neither library is imported unless a value of it is there: MPI codes run without torch.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from resilio_hpc.ckpt.slab import Slab, slab_of
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch, UsageError

Kind = Literal["torch", "numpy"]
LARGE_BYTES = 64 * 1024
"""From this size on a tensor begins on a page, and may be copied in the background."""
_NUMPY_HAS = {"float32", "float64", "float16", "int64", "int32", "uint8", "int8", "bool"}


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: where it is in the state, what it is, and the live tensor itself (a slab's local one).

    ``identity`` is equal for two views of exactly the same elements (None for empty tensors). ``value`` None: described
    only, another process has it.
    """

    path: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    value: Any
    identity: tuple[Any, ...] | None
    slab: Slab | None = None

    @property
    def held_bytes(self) -> int:
        """What it takes in a snapshot."""
        return 0 if self.value is None else self.size_bytes


def is_tensor(value: Any) -> bool:
    """Is ``value`` a torch tensor or a numpy array?"""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def describe(value: Any, path: str) -> Leaf:
    """What ``value`` is. Raises UsageError for a tensor that is not plain bytes in this process."""
    slab = slab_of(value)
    if slab is not None:
        leaf = describe(slab.tensor, path)
        part = (*slab.global_shape, *slab.start, slab.replica)
        return replace(leaf, slab=slab, identity=leaf.identity and (*leaf.identity, part))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _describe_numpy(value, path)
    return _describe_torch(value, path)


def _describe_numpy(value: Any, path: str) -> Leaf:
    numpy = sys.modules["numpy"]
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise UsageError(f"a {type(value).__name__} cannot be saved; convert it to a plain numpy array")
    if value.dtype.kind in "OV":
        raise UsageError(f"an array of dtype {value.dtype} cannot be saved; use arrays of numbers or strings")
    size = int(value.nbytes)
    identity = ("numpy", value.ctypes.data, value.shape, value.strides, value.dtype.str) if size else None
    return Leaf(path, "numpy", value.dtype.str, tuple(value.shape), size, value, identity)


def _describe_torch(value: Any, path: str) -> Leaf:
    import torch

    plain = value.detach()
    if type(plain) is not torch.Tensor:
        raise UsageError(f"a {type(value).__name__} cannot be saved; convert it to a DTensor or a plain tensor")
    device = plain.device
    if plain.is_quantized:
        raise UsageError("a quantised tensor cannot be saved; save its int_repr(), scales and zero points")
    if plain.layout is not torch.strided or device.type == "meta":
        what = device.type if device.type == "meta" else plain.layout
        raise UsageError(f"a tensor of kind {what} cannot be saved; convert it to a dense tensor")
    dtype, shape, size = plain.dtype, tuple(plain.shape), plain.nbytes
    identity = (device, plain.data_ptr(), shape, plain.stride(), dtype, plain.is_conj()) if size else None
    return Leaf(path, "torch", _name_of(dtype), shape, size, plain, identity)


@cache
def _name_of(torch_dtype: Any) -> str:
    return str(torch_dtype).removeprefix("torch.")


def bytes_of(value: Any) -> memoryview | None:
    """The tensor's own memory, flat and writable where the tensor is; None unless it is contiguous and on the CPU."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if not value.flags.c_contiguous:
            return None
        return memoryview(value.reshape(-1).view(numpy.uint8)) if value.nbytes else memoryview(b"")
    import torch

    plain = value.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return None
    if plain.numel() == 0:
        return memoryview(b"")
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())


def buffer_of(leaf: Leaf) -> Any:
    """Something with the buffer protocol that has the bytes of ``bytes_of``; made in less time."""
    if leaf.kind == "torch" and leaf.dtype in _NUMPY_HAS and leaf.value.device.type == "cpu":
        value = leaf.value
        plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return value.numpy() if plain else None
    return bytes_of(leaf.value)


def copy_out(value: Any, target: memoryview) -> None:
    """Copy a tensor that is strided or on a device into ``target``, in row-major order."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        numpy.copyto(numpy.frombuffer(target, dtype=value.dtype).reshape(value.shape), value)
        return
    import torch

    plain = value.detach()
    torch.frombuffer(target, dtype=torch.uint8).view(plain.dtype).reshape(plain.shape).copy_(plain)


def copy_into(target: Any, source: Any) -> None:
    """Assign ``source`` to the elements of ``target``, in place."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        numpy.copyto(target, source)
        return
    target.detach().copy_(source)


def is_meta(value: Any) -> bool:
    """Is it a torch tensor without memory, on the meta device?"""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.device.type == "meta"


def give_memory(value: Any) -> None:
    """Let a tensor on the meta device have memory, its content not set; whoever refers to it sees that.

    On torch's default device, or that of a DTensor's mesh. Raises UsageError for a tensor that torch cannot exchange.
    """
    import torch

    mesh = getattr(value, "device_mesh", None)
    device = torch.get_default_device() if mesh is None else torch.device(mesh.device_type)
    with torch.no_grad():
        made = torch.empty_like(value, device=device)
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, value.requires_grad)
    try:
        torch.utils.swap_tensors(value, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"a tensor on the meta device cannot be given memory ({error}); use to_empty() first"
        ) from error


def state_on_meta(module: Any, name: str) -> Any:
    """The state_dict of a module that has tensors on the meta device, with those tensors themselves; None for others.

    Raises UsageError for a buffer there that is not in the state: nobody would ever fill it.
    """
    if not any(map(is_meta, (*module.parameters(), *module.buffers()))):
        return None
    state = module.state_dict(keep_vars=True)
    kept = set(map(id, state.values()))
    for path, buffer in module.named_buffers():
        if is_meta(buffer) and id(buffer) not in kept:
            raise UsageError(
                f"{name}: the buffer {path} is on the meta device, and no checkpoint holds what is not "
                "persistent; make it again on a device before the restore"
            )
    return state


def check_fits(target: Any, kind: Kind, dtype: str, shape: tuple[int, ...]) -> None:
    """Can a saved tensor go into ``target`` as it is? Raises LayoutMismatch, or UsageError if that is read-only."""
    if is_meta(target):
        live: tuple[Kind, str, tuple[int, ...]] = "torch", _name_of(target.dtype), tuple(target.shape)
    else:
        try:
            leaf = describe(target, "")
        except UsageError as error:
            raise UsageError(f"nothing can be restored into it: {error}") from error
        live = leaf.kind, leaf.dtype, leaf.shape
    if live[0] != kind:
        raise LayoutMismatch(f"the checkpoint holds a {kind} tensor, the state a {live[0]} tensor")
    if live[2] != shape:
        raise LayoutMismatch(f"the checkpoint holds shape {list(shape)}, the state {list(live[2])}")
    if live[1] != dtype:
        raise LayoutMismatch(f"the checkpoint holds dtype {dtype}, the state {live[1]}")
    if kind == "numpy" and not target.flags.writeable:
        raise UsageError("the array in the state is read-only, nothing can be restored into it")


def check_description(kind: Kind, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
    """Does a tensor of this dtype and shape have that size? Raises CorruptCheckpoint before anything is allocated."""
    try:
        item = torch_dtype(dtype).itemsize if kind == "torch" else numpy_dtype(dtype).itemsize
    except (ValueError, TypeError) as error:
        raise CorruptCheckpoint(str(error)) from error
    if len(shape) > 64 or any(length < 0 or length >= 1 << 56 for length in shape):
        raise CorruptCheckpoint(f"impossible shape {list(shape)[:64]}")
    if math.prod(shape) * item != size_bytes:
        raise CorruptCheckpoint(f"a {dtype} tensor of shape {list(shape)} does not have {size_bytes} bytes")


def empty(kind: Kind, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new tensor on the CPU, its content not set. Raises CorruptCheckpoint for a shape that cannot be."""
    try:
        if kind == "numpy":
            import numpy

            return numpy.empty(shape, dtype=numpy_dtype(dtype))
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype))
    except (ValueError, RuntimeError) as error:
        raise CorruptCheckpoint(f"cannot make a {dtype} tensor of shape {list(shape)}: {error}") from error


def torch_dtype(name: str) -> Any:
    """The torch dtype of that name. Raises ValueError for anything else that torch has under the name."""
    import torch

    found = getattr(torch, name, None) if re.fullmatch(r"[a-z][a-z0-9_]*", name) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found


def numpy_dtype(name: str) -> Any:
    """The numpy dtype of that array-protocol string. Raises ValueError for objects and records."""
    import numpy

    try:
        found = numpy.dtype(name) if re.fullmatch(r"[<>|=][a-zA-Z]\d+(\[\d*\w+\])?", name) else None
    except TypeError:
        found = None
    if found is None or found.kind in "OV":
        raise ValueError(f"{name!r} is not a dtype of numbers or strings")
    return found
