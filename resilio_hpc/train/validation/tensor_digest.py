"""A digest of the bytes of tensors. One flipped bit always changes it.

On the CPU it is the CRC-32C of the bytes, by the native code. On a device it is a sum over 32-bit words modulo 2^64,
each word times an odd weight that depends on its place. An odd weight can be inverted modulo 2^64, so a change of one
word never cancels. The weights come from SplitMix64 (Steele, Lea and Flood 2014), so moved, exchanged, and periodic
values change the sum with a probability of about 1 - 2^-32 or better.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from resilio_hpc.native import crc32c

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
CHUNK = 1 << 20
"""Words that are weighted at once on a device: 8 MiB of weights, made once."""

_weights: dict[Any, torch.Tensor] = {}


def signed(value: int) -> int:
    """Return the number as torch's int64 has it."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def combined(values: list[int]) -> int:
    """Return one number of several. A change of a single one of them always changes it."""
    total = 0
    for value in values:
        total = (total * _GOLDEN + value) & MASK
    return total


def digest_of(tensor: torch.Tensor, start: int, stop: int) -> int | torch.Tensor:
    """Return the digest of the bytes ``start`` … ``stop - 1`` of a tensor, which are multiples of 8, or its end.

    On a device it is a tensor of one int64 there, so that the host does not wait for it.
    """
    flat = _flat(tensor)
    if flat.device.type == "cpu":
        return crc32c(bytes_of(flat)[start:stop])
    return word_sum(flat, start, stop)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU. It must outlive them.

    Not by ``Tensor.numpy``: torch never resizes a storage again of which it has made an array.
    """
    size = int(flat.nbytes)
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr())).cast("B") if size else memoryview(b"")


def word_sum(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the weighted sum of the words of a contiguous, flat tensor, as one int64 on its device."""
    size = flat.element_size() * flat.numel()
    dtype, width = (torch.int32, 4) if size % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0 else (
        torch.uint8, 1)  # fmt: skip
    words = flat.view(torch.uint8).view(dtype)[start // width : stop // width]
    weights = _weights_on(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), CHUNK):
        chunk = words[begin : begin + CHUNK].to(torch.int64)
        total = total * signed(_GOLDEN) + (chunk * weights[: chunk.numel()]).sum()
    return total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one row; a copy where they do not lie so."""
    own = tensor.detach()
    if hasattr(own, "to_local"):
        own = own.to_local()
    return own.resolve_conj().resolve_neg().contiguous().reshape(-1)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in this process."""
    own = tensor.detach()
    if hasattr(own, "to_local"):
        own = own.to_local()
    return int(own.nbytes)


def _weights_on(device: torch.device) -> torch.Tensor:
    found = _weights.get(device)
    if found is None:
        found = _weights[device] = _mixed(torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device)) | 1
    return found


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64: its additions and products wrap, as those of int64 do."""
    value = value * signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
