"""numpy's scalars, arrays and dtypes in files of torch.save, read without any numpy function that a pickle may call.

A pickle names functions of numpy. Here each name maps to one of this module, which takes plain descriptions and bytes,
checks them, and makes the value itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from resilio_hpc.ckpt.state import containers, numpy_types
from resilio_hpc.core.errors import UsageError

_MAX_DEPTH = 16


class _Dtype:
    """Stands for a dtype; its state holds byte order, fields and units."""

    def __init__(self, text: str, align: bool = False, copy: bool = True) -> None:
        self._text = text
        self._state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def text(self, depth: int = 0) -> str:
        """Return the dtype as ``numpy_types`` writes it. Raises ValueError and similar errors for an invalid state."""
        if depth > _MAX_DEPTH:
            raise ValueError("a dtype that is nested too deep")
        if not self._state:
            return f"={self._text}"
        _, order, base, names, fields, size, _, flags, *more = self._state
        if base is not None:
            described: Any = {"base": base[0].text(depth + 1), "shape": list(base[1])}
            return json.dumps(described)
        if names is not None:
            described = {
                "names": list(names),
                "formats": [fields[name][0].text(depth + 1) for name in names],
                "offsets": [fields[name][1] for name in names],
                "itemsize": size,
                "aligned": bool(flags & 0x80),
            }
            return json.dumps(described)
        unit = ""
        if self._text in ("M8", "m8") and more:
            name, count = more[0][1][:2]
            unit = f"[{count if count != 1 else ''}{name.decode('ascii')}]" if name != b"generic" else ""
        return f"{order}{self._text}{unit}"

    def made(self) -> Any:
        """Return the dtype."""
        return numpy_types.dtype_of(self.text())


class _Array:
    """Stands for an array until the whole file is read."""

    _state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def made(self) -> Any:
        """Return the array. Raises ValueError and similar errors for an invalid state."""
        import numpy

        _, shape, dtype, by_columns, data = self._state
        if type(data) is not bytes:
            raise UsageError("an array of objects, which only code could read")
        found = numpy.frombuffer(bytearray(data), dtype=dtype.made()) if data else numpy.empty(0, dtype.made())
        return found.reshape(tuple(shape), order="F" if by_columns else "C")


class _Ndarray:
    """Stands for numpy.ndarray, which is named and never made."""


def _scalar(dtype: _Dtype, data: Any) -> Any:
    if type(dtype) is not _Dtype or type(data) is not bytes:
        raise UsageError("a scalar of objects, which only code could read")
    return numpy_types.scalar_of(dtype.text(), data)


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Ndarray:
        raise UsageError("an array of a class of its own")
    return _Array()


def _bytes(*given: Any) -> bytes:
    """Return empty bytes, as pickles of protocol 2 make them."""
    if given:
        raise UsageError("bytes made of something else")
    return b""


STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_bytes, f"{builtins}.bytes") for builtins in ("builtins", "__builtin__")),
    (_Dtype, "numpy.dtype"),
    (_Ndarray, "numpy.ndarray"),
    (_Array, "resilio_hpc.ckpt.convert.numpy_pickles._Array"),
]
"""For ``torch.serialization.safe_globals``."""


def settled(state: Any) -> Any:
    """Return the result with real arrays and dtypes. Raises ValueError and similar errors, UsageError."""

    def settle(value: Any) -> Any:
        return value.made() if type(value) in (_Array, _Dtype) else value

    return containers.map_leaves(state, settle)
