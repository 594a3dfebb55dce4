"""The operations of a checkpoint on torch tensors and numpy arrays, which it sees as bytes.

Neither library is imported unless a value of it exists: MPI codes run without torch.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import mul
from typing import Any, Literal

from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.ckpt.state import numpy_types
from resilio_hpc.ckpt.state.slab import Slab, slab_of
from resilio_hpc.core.errors import CorruptCheckpoint, UsageError

Kind = Literal["torch", "numpy"]
LARGE_BYTES = 64 * 1024
"""From this size on a tensor begins on a page, and may be copied in the background."""
MAX_DIMENSIONS = 31  # HDF5 has 32, and a dtype without an HDF5 type takes one more
LONGEST = 1 << 56
_NUMPY_HAS = {"float32", "float64", "float16", "int64", "int32", "uint8", "int8", "bool"}


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: where it is in the state, what it is, and the live tensor itself (a slab's local one).

    ``identity`` is equal for two views of exactly the same elements (None for empty tensors). ``value`` None: described
    only, another process has it. ``strides``: see ``dense_strides``.
    """

    path: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    value: Any
    identity: tuple[Any, ...] | None
    slab: Slab | None = None
    strides: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Return its bytes in a snapshot."""
        return 0 if self.value is None else self.size_bytes


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a torch tensor or a numpy array."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def describe(value: Any, path: str) -> Leaf:
    """Return the description of ``value``. Raises UsageError for a tensor that is not plain bytes in this process."""
    slab = slab_of(value)
    if slab is not None:
        leaf = describe(slab.tensor, path)
        part = (*slab.global_shape, *slab.start, slab.replica)
        return replace(leaf, slab=slab, identity=leaf.identity and (*leaf.identity, part), strides=())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _describe_numpy(value, path)
    return _describe_torch(value, path)


def _describe_numpy(value: Any, path: str) -> Leaf:
    numpy = sys.modules["numpy"]
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise UsageError(f"a {type(value).__name__} cannot be saved; convert it to a plain numpy array")
    dtype, shape, size = numpy_types.text_of(value.dtype), tuple(value.shape), int(value.nbytes)
    _check_shape(shape)
    identity = ("numpy", value.ctypes.data, shape, value.strides, dtype) if size else None
    strides = () if value.flags.c_contiguous else tuple(step // value.itemsize for step in value.strides)
    return Leaf(path, "numpy", dtype, shape, size, value, identity, strides=dense_strides(shape, strides))


def _describe_torch(value: Any, path: str) -> Leaf:
    import torch

    if type(value) is not torch.nn.Parameter and torch.nn.parameter.is_lazy(value):
        raise UsageError("a parameter of a lazy module has no shape yet; run the module once before it is saved")
    plain = value.detach()
    if type(plain) is not torch.Tensor and not _is_of_a_device(plain):
        raise UsageError(f"a {type(value).__name__} cannot be saved; convert it to a DTensor or a plain tensor")
    device = plain.device
    if plain.is_quantized:
        raise UsageError("a quantised tensor cannot be saved; save its int_repr(), scales and zero points")
    if plain.is_nested:
        raise UsageError("a nested tensor cannot be saved; save its unbind()")
    if device.type == "meta":
        raise UsageError("a tensor on the meta device has no values to save")
    if plain.layout is not torch.strided:
        raise UsageError(f"a tensor of kind {plain.layout} cannot be saved; convert it to a dense tensor")
    dtype, shape, size = plain.dtype, tuple(plain.shape), plain.nbytes
    if len(shape) > MAX_DIMENSIONS or not size:
        _check_shape(shape)
    if not size:
        return Leaf(path, "torch", dtype_name(dtype), shape, size, plain, None)
    address, stride = plain.data_ptr(), plain.stride()
    end = plain.storage_offset() * plain.itemsize + size
    if not address or end > plain.untyped_storage().nbytes() or not plain.is_contiguous():
        _check_memory(plain, address, stride)
    identity = (device, address, shape, stride, dtype, plain.is_conj(), plain.is_neg())
    return Leaf(path, "torch", dtype_name(dtype), shape, size, plain, identity, strides=dense_strides(shape, stride))


@lru_cache(1 << 16)  # every save asks for the same ones
def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides, in elements, by which a tensor fills one piece of memory in another order; () for any other.

    Such are those of ``channels_last`` and of Fortran. A checkpoint has elements in row-major order, and notes these.
    """
    in_order, extent = [], 1
    for length in reversed(shape):
        in_order.append(extent)
        extent *= length
    if len(strides) != len(shape) or not extent or strides == tuple(reversed(in_order)):
        return ()
    if not all(0 <= step < LONGEST for step in strides):
        return ()
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(strides, shape, strict=True) if length > 1):
        if step != expected:
            return ()
        expected *= length
    return strides


def _is_of_a_device(plain: Any) -> bool:
    """Return whether a tensor of a class of its own is one of a registered device, whose content it copies."""
    device = DEVICES.of(plain)
    return device is not None and isinstance(plain, device.classes)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise UsageError(f"a tensor of {len(shape)} dimensions cannot be saved: HDF5 has at most {MAX_DIMENSIONS}")
    if shape and max(shape) >= LONGEST:
        raise UsageError(f"a tensor of shape {list(shape)} cannot be saved: a length is too large")


def _check_memory(plain: Any, address: int, stride: tuple[int, ...]) -> None:
    """Check that a tensor lies inside of its storage: sharding libraries free storages, and a read there crashes."""
    contiguous = plain.is_contiguous()
    last = plain.numel() if contiguous else 1 + sum(map(mul, (length - 1 for length in plain.shape), stride))
    needed, held = (plain.storage_offset() + last) * plain.itemsize, plain.untyped_storage().nbytes()
    if held < needed or not address:
        raise UsageError(
            f"a tensor of {plain.nbytes} bytes has a storage of {held if address else 0}: it was freed or resized, as "
            "sharding libraries do; save and restore it while its memory is there"
        )


@cache
def dtype_name(torch_dtype: Any) -> str:
    """Return the name of a torch dtype, such as "float32"."""
    return str(torch_dtype).removeprefix("torch.")


def bytes_of(value: Any) -> memoryview | None:
    """Return the tensor's own memory, flat and writable where the tensor is.

    None unless it is contiguous and on the CPU.
    """
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
    flat = plain.as_strided((plain.numel(),), (1,))  # reshape leaves a single element its stride, which may be any
    return memoryview(flat.view(torch.uint8).numpy())


def buffer_of(leaf: Leaf) -> Any:
    """Return an object with the buffer protocol that has the bytes of ``bytes_of``; made in less time."""
    if leaf.kind == "torch" and leaf.dtype in _NUMPY_HAS and leaf.value.device.type == "cpu":
        value = leaf.value
        plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return value.numpy() if plain else None
    return bytes_of(leaf.value)


def copy_out(value: Any, target: memoryview) -> None:
    """Copy a tensor that is strided or on a device into ``target``, in row-major order."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        source = numpy_types.raw_view(value)
        numpy.copyto(numpy.frombuffer(target, dtype=source.dtype).reshape(value.shape), source)
        return
    if value.numel() == 0:  # torch refuses an empty buffer
        return
    import torch

    plain = _as_bits(value.detach())
    torch.frombuffer(target, dtype=torch.uint8).view(plain.dtype).reshape(plain.shape).copy_(plain)


def _as_bits(plain: Any) -> Any:
    """Return the same elements as whole numbers of their size: torch has no copies of some of its dtypes."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.itemsize)
    return plain if bits is None or plain.is_conj() or plain.is_neg() else plain.view(bits)


def copy_into(target: Any, source: Any) -> None:
    """Assign ``source`` to the elements of ``target``, in place."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        numpy.copyto(numpy_types.raw_view(target), numpy_types.raw_view(source))
        return
    import torch

    plain = target.detach()
    with torch.inference_mode(target.is_inference()):
        if plain.dtype == source.dtype and _as_bits(plain) is not plain and _as_bits(source) is not source:
            plain, source = _as_bits(plain), _as_bits(source)
        device = DEVICES.of(plain)
        (plain.copy_ if device is None else partial(device.copy_in, plain))(source)


def same_bytes(one: Any, other: Any) -> bool:
    """Return whether two tensors of one dtype and shape have the same content, to the last bit."""
    rooms = [memoryview(bytearray(one.nbytes)) for _ in range(2)]
    copy_out(one, rooms[0])
    copy_out(other, rooms[1])
    return rooms[0] == rooms[1]


def check_description(kind: Kind, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
    """Raise CorruptCheckpoint where a tensor of this dtype and shape has another size, before it is allocated."""
    try:
        item = torch_dtype(dtype).itemsize if kind == "torch" else numpy_types.dtype_of(dtype).itemsize
    except (ValueError, TypeError) as error:
        raise CorruptCheckpoint(str(error)) from error
    if len(shape) > MAX_DIMENSIONS or any(length < 0 or length >= LONGEST for length in shape):
        raise CorruptCheckpoint(f"impossible shape {list(shape)[:MAX_DIMENSIONS]}")
    if math.prod(shape) * item != size_bytes:
        raise CorruptCheckpoint(f"a {dtype} tensor of shape {list(shape)} does not have {size_bytes} bytes")


def empty(kind: Kind, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> Any:
    """Return a new tensor on the CPU, content not set; ``strides``: where it is not in row-major order.

    Raises CorruptCheckpoint for an impossible shape.
    """
    if strides := dense_strides(shape, strides):
        order = sorted(range(len(shape)), key=lambda dimension: -strides[dimension])
        made = empty(kind, dtype, tuple(shape[dimension] for dimension in order))
        if kind == "numpy":
            return made.transpose(tuple(map(order.index, range(len(order)))))
        return made.as_strided(shape, strides)
    try:
        if kind == "numpy":
            import numpy

            return numpy.empty(shape, dtype=numpy_types.dtype_of(dtype))
        import torch

        wanted = torch_dtype(dtype)
        if wanted is torch.complex32:  # torch warns of the first one that a process allocates
            return torch.empty(shape, dtype=torch.int32, device="cpu").view(wanted)
        return torch.empty(shape, dtype=wanted, device="cpu")
    except (ValueError, RuntimeError) as error:
        raise CorruptCheckpoint(f"cannot make a {dtype} tensor of shape {list(shape)}: {error}") from error


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of that name. Raises ValueError for anything else that torch has under the name."""
    import torch

    found = getattr(torch, name, None) if re.fullmatch(r"[a-z][a-z0-9_]*", name) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found
