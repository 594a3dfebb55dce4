"""Memory as bytes of numpy arrays, the numbers that come with it, and the C library's calls on its addresses."""

from __future__ import annotations

import ctypes
import operator
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer


Bytes = npt.NDArray[np.uint8]

PAGE = os.sysconf("SC_PAGESIZE")
LIBC: Any = ctypes.CDLL(None, use_errno=True)


def bytes_of(memory: Buffer, is_written: bool = False) -> Bytes:
    """Return the memory itself, as bytes. Raises TypeError for what is none, or cannot be written as it has to be."""
    with memoryview(memory) as view:
        if is_written and view.readonly:
            raise TypeError("a read-write bytes-like object is needed")
        if not view.c_contiguous:
            raise BufferError("the memory is not contiguous")
    data: Bytes = np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload]
    return data


def address_of(data: Bytes) -> int:
    """Return where the first byte is."""
    return int(data.ctypes.data)


def numbers(item: object, count: int) -> tuple[int, ...]:
    """Return the integers of a tuple of so many. Raises TypeError."""
    if not isinstance(item, tuple) or len(item) != count:
        raise TypeError(f"a tuple of {count} integers is needed, not {item!r:.80}")
    return tuple(map(operator.index, item))


def last_error() -> OSError:
    """Return the error of the last call to the C library."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
