"""The HDF5 type of a tensor: one that every HDF5 program converts, or else its bytes."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import h5py
import numpy

from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.state import numpy_types

_AS_THEY_ARE = {"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_AS_THEY_ARE |= {"float16", "float32", "float64", "complex64", "complex128"}
_FLOATS = {  # bytes, bits of the exponent, bits of the mantissa, bias: like IEEE 754, with other sizes
    "bfloat16": (2, 8, 7, 127),
    "float8_e5m2": (1, 5, 2, 15),
}
BYTE = h5py.h5t.STD_U8LE


class Stored(NamedTuple):
    """An HDF5 type. ``name``: the real dtype's, where HDF5 has no type for it."""

    type: Any
    shape: tuple[int, ...]
    name: str = ""


def stored_as(record: TensorRecord) -> Stored:
    """Return the HDF5 type and shape of a tensor; a dtype that HDF5 lacks becomes bytes, with one more dimension.

    float8_e4m3fn and similar dtypes are among those: they have numbers where HDF5 would see infinities.
    """
    if record.dtype in _FLOATS:
        return Stored(_float(record.dtype), record.shape, record.dtype)
    plain = _plain(record.kind, record.dtype)
    if plain is not None:
        return Stored(plain, record.shape)
    count = 1
    for length in record.shape:
        count *= length
    return Stored(BYTE, (*record.shape, record.size_bytes // count if count else 1), record.dtype)


@cache  # each new name and type may stay in memory for good
def _plain(kind: str, dtype: str) -> Any:
    """Return the HDF5 type, None where it has none. A structured dtype becomes a compound with the same bytes."""
    if kind == "torch":
        return h5py.h5t.py_create(numpy.dtype(dtype), logical=True) if dtype in _AS_THEY_ARE else None
    known = numpy_types.dtype_of(dtype)
    if known.name in _AS_THEY_ARE:
        return h5py.h5t.py_create(known, logical=True)
    if not known.names or any(known[name].name not in _AS_THEY_ARE for name in known.names):
        return None
    made = h5py.h5t.py_create(known, logical=True)
    offsets = [made.get_member_offset(number) for number in range(made.get_nmembers())]
    is_same = made.get_size() == known.itemsize and offsets == [known.fields[name][1] for name in known.names]
    return made if is_same else None  # h5py moves fields that overlap


@cache
def _float(dtype: str) -> Any:
    size, exponent, mantissa, bias = _FLOATS[dtype]
    made = h5py.h5t.IEEE_F16LE.copy()
    made.set_fields(exponent + mantissa, mantissa, exponent, 0, mantissa)
    made.set_size(size)
    made.set_precision(8 * size)
    made.set_ebias(bias)
    return made
