"""numpy's dtypes as text, and back: numbers, times, strings of a fixed length, raw bytes, and structures of these.

A simple dtype is numpy's own array-protocol string (``<f4``, ``<M8[ns]``). One of the package ml_dtypes is its name
(``bfloat16``). A structure is a JSON object that says where each field begins.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from resilio_hpc.core.errors import UsageError

_SIMPLE = re.compile(r"[<>|=][a-zA-Z]\d+(\[\d*\w+\])?|<[mM]8")
_ML_DTYPES = re.compile(r"bfloat16|float[468]_e\d+m\d+\w*|u?int[1-7]")
_MAX_DEPTH = 16


def text_of(dtype: Any) -> str:
    """Return the text of a numpy dtype. Raises UsageError for one that a checkpoint cannot hold."""
    # to numpy, aligned and unaligned structures are equal
    return _known(dtype) if dtype.names is None and dtype.subdtype is None else _checked(dtype)


@cache
def _known(dtype: Any) -> str:
    return _checked(dtype)


def _checked(dtype: Any) -> str:
    found = _text_of(dtype)
    try:
        back = dtype_of(found)
    except ValueError:
        back = None
    if back != dtype or back.itemsize != dtype.itemsize or back.isalignedstruct != dtype.isalignedstruct:
        raise _refusal(dtype)
    return found


def _refusal(dtype: Any) -> UsageError:
    return UsageError(
        f"dtype {dtype} cannot be saved; numbers, times, strings of a fixed length and structures of these can"
    )


def _text_of(dtype: Any) -> str:
    import numpy

    if dtype.type.__module__ == "ml_dtypes":
        return str(dtype.name)
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return json.dumps({"base": _text_of(base), "shape": list(shape)}, separators=(",", ":"))
    if dtype.kind in "OT" or dtype.type.__module__ != "numpy" or dtype.type is numpy.record:
        raise _refusal(dtype)
    if dtype.names is None:
        return str(dtype.str)
    fields = [dtype.fields[name] for name in dtype.names]
    if any(len(field) > 2 for field in fields):  # with a title
        raise _refusal(dtype)
    described = {
        "names": list(dtype.names),
        "formats": [_text_of(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }
    return json.dumps(described, separators=(",", ":"))


def dtype_of(text: str, depth: int = 0) -> Any:
    """Return the numpy dtype of a text.

    Raises ValueError for anything else, objects among them, UsageError for a package that is missing.
    """
    import numpy

    if depth > _MAX_DEPTH:
        raise ValueError("a dtype that is nested too deep")
    try:
        if text.startswith("{"):
            return _described(json.loads(text), depth)
        if _ML_DTYPES.fullmatch(text):
            return _of_ml_dtypes(text)
        found = numpy.dtype(text) if _SIMPLE.fullmatch(text) else None
    except (TypeError, KeyError, OverflowError, RecursionError):
        found = None
    if found is None or found.kind in "OT":
        raise ValueError(f"{text[:80]!r} is not a dtype of numbers or strings")
    return found


def _described(spec: Any, depth: int) -> Any:
    import numpy

    if "base" in spec:
        return numpy.dtype((dtype_of(spec["base"], depth + 1), tuple(spec["shape"])))
    layout = {key: spec[key] for key in ("names", "offsets", "itemsize")}
    layout["formats"] = [dtype_of(each, depth + 1) for each in spec["formats"]]
    made: Any = numpy.dtype
    return made(layout, align=spec["aligned"] is True)


def _of_ml_dtypes(name: str) -> Any:
    import numpy

    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(f"arrays of {name} need the package ml_dtypes: pip install ml_dtypes") from None
    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise ValueError(f"this ml_dtypes has no {name}")
    return numpy.dtype(found)


def scalar_of(text: str, data: bytes) -> Any:
    """Return the numpy scalar of that dtype with these bytes. Raises ValueError."""
    import numpy

    dtype = dtype_of(text)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a scalar of {dtype.itemsize}")
    if dtype.kind == "S":  # out of an array they would lack zeros at the end
        return numpy.bytes_(data)
    if dtype.kind == "U":
        order = "be" if dtype.str[0] == ">" else "le"
        return numpy.str_(data.decode(f"utf-32-{order}", "surrogatepass"))
    return numpy.frombuffer(bytearray(data), dtype=dtype)[0] if data else dtype.type()


def bytes_of(scalar: Any) -> bytes:
    """Return the bytes of a numpy scalar.

    Zeros stand between the fields of a structure, where numpy leaves old memory.
    """
    import numpy

    if scalar.dtype.names is None:
        return bytes(scalar.tobytes())
    made = numpy.zeros((), dtype=scalar.dtype)
    made[()] = scalar
    return made.tobytes()


def raw_view(array: Any) -> Any:
    """Return the same elements as raw bytes, so that copies include the bytes between fields."""
    return array.view(f"V{array.dtype.itemsize}") if array.dtype.names is not None else array
