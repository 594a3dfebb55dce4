"""Files in shared memory, mapped where huge pages can be, and given huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from resilio_hpc.native.portable.buffers import LIBC, PAGE, address_of, bytes_of, last_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; EINVAL before
_PROT_NONE, _MAP_FIXED = 0, 0x10
_FAILED = ctypes.c_void_p(-1).value

_mmap = LIBC.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = LIBC.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = LIBC.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Mapping:
    """The mapping, as long as a view of it is used. Python's mmap takes no address, and keeps a descriptor."""

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self._place = address, size
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, not writable), "version": 3}

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        munmap(*self._place)


def map_shared(fd: int, size: int, writable: bool, /) -> memoryview:
    """Return the first ``size`` bytes of the file, mapped at an address that is a multiple of a huge page."""
    length = os.fstat(fd).st_size
    if not 0 < size <= length:
        raise ValueError(f"map_shared: {size} bytes of a file of {length}")
    address = _map_aligned(fd, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    return np.asarray(_Mapping(address, size, writable)).data


def _map_aligned(fd: int, size: int, protection: int) -> int:
    room = _mmap(None, size + _HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        raise last_error()
    before = -room % _HUGE_PAGE
    whole = -(-size // PAGE) * PAGE
    address = _mmap(room + before, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if address == _FAILED:
        error = last_error()
        _munmap(room, size + _HUGE_PAGE)
        raise error
    if before:
        _munmap(room, before)
    if before + whole < size + _HUGE_PAGE:
        _munmap(room + before + whole, size + _HUGE_PAGE - before - whole)
    return int(address)


def make_huge(mapping: Buffer, /) -> bool:
    """Have the kernel gather the pages into huge ones; return whether all of them are."""
    data = bytes_of(mapping)
    first = -(-address_of(data) // _HUGE_PAGE) * _HUGE_PAGE
    end = (address_of(data) + data.size) // _HUGE_PAGE * _HUGE_PAGE
    if first >= end:
        return True
    return PAGE == 4096 and _madvise(first, end - first, _MADV_COLLAPSE) == 0  # other pages have other huge pages
