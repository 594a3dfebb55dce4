"""Copies with checksums, pages that are made present, and words that processes wait at."""

from __future__ import annotations

import ctypes
import errno
import platform
import secrets
import time
from typing import TYPE_CHECKING

import numpy as np

from resilio_hpc.native.portable.buffers import LIBC, PAGE, Bytes, address_of, bytes_of, last_error, numbers
from resilio_hpc.native.portable.checksum import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_PIECE_PAGES = 4096
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_POLL_S = 0.001

_madvise = LIBC.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mincore = LIBC.mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# ---- copies ----------------------------------------------------------------------------------------------------------


def copy_crc32c(target: Buffer, source: Buffer, /) -> int:
    """Copy; return the CRC32C of what the target holds then."""
    to, data = bytes_of(target, True), bytes_of(source)
    if to.size != data.size:
        raise ValueError(f"copy_crc32c: target has {to.size} bytes, source has {data.size}")
    return _copied(to, data)


def copy_blocks(target: Buffer, blocks: list[tuple[int, Buffer, int, int]], /) -> list[int]:
    """Copy (at, source, start, size) each; return their CRC32C. Nothing is copied if one of them is refused."""
    room = bytes_of(target, True)
    if not isinstance(blocks, list):
        raise TypeError("copy_blocks: the blocks are a list")
    copies = [_checked(room, block) for block in blocks]
    return [_copied(to, data) for to, data in copies]


def _copied(to: Bytes, data: Bytes) -> int:
    np.copyto(to, data)
    return crc32c(to.data)


def _checked(room: Bytes, block: tuple[int, Buffer, int, int]) -> tuple[Bytes, Bytes]:
    if not isinstance(block, tuple) or len(block) != 4:
        raise TypeError("copy_blocks: a block is (at, source, start, size)")
    at, start, size = numbers((block[0], block[2], block[3]), 3)
    data = bytes_of(block[1])
    if min(at, start, size) < 0 or at + size > room.size or start + size > data.size:
        raise ValueError(f"copy_blocks: {size} bytes from {start} of {data.size} to {at} of {room.size}")
    return room[at : at + size], data[start : start + size]


# ---- pages -----------------------------------------------------------------------------------------------------------


def populate(mapping: Buffer, /) -> None:
    """Make every whole page present, and writable if the memory is. Raises OSError."""
    data = bytes_of(mapping)
    first, end = _whole_pages(data)
    _populate(first, end, _MADV_POPULATE_WRITE if data.flags.writeable else _MADV_POPULATE_READ)


def populate_missing(memory: Buffer, /) -> None:
    """Do the same for the parts of anonymous memory that lack pages. Raises OSError."""
    first, end = _whole_pages(bytes_of(memory, True))
    for at in range(first, end, _PIECE_PAGES * PAGE):
        until = min(at + _PIECE_PAGES * PAGE, end)
        if not _is_present(at, until):
            _populate(at, until, _MADV_POPULATE_WRITE)


def _whole_pages(data: Bytes) -> tuple[int, int]:
    return -(-address_of(data) // PAGE) * PAGE, (address_of(data) + data.size) // PAGE * PAGE


def _is_present(first: int, end: int) -> bool:
    pages = np.zeros((end - first) // PAGE, dtype=np.uint8)
    return _mincore(first, end - first, pages.ctypes.data) == 0 and bool((pages & 1).all())


def _populate(first: int, end: int, how: int) -> None:
    """Before Linux 5.14 (EINVAL) the pages fault in one by one when they are used."""
    if first < end and _madvise(first, end - first, how) != 0 and ctypes.get_errno() != errno.EINVAL:
        raise last_error()


# ---- a word of shared memory that processes wait at ------------------------------------------------------------------


def await_word(memory: Buffer, at: int, seen: int, seconds: float, /) -> None:
    """Wait until the 32 bits at ``at`` are not ``seen``, or that time is over, or for less time. futex(2)."""
    address = _word(bytes_of(memory, True), at)
    if _FUTEX_CALL is None:
        if ctypes.c_uint32.from_address(address).value == seen:
            time.sleep(min(seconds, _POLL_S))
        return
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _futex(address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit))


def change_word(memory: Buffer, at: int, /) -> None:
    """Change the 32 bits there, and wake all that wait for it, in any process.

    To add 1 is no single step here: of two processes that add at the same time, one could undo the other's news. A
    number drawn at random is news to each that waits.
    """
    address = _word(bytes_of(memory, True), at)
    word = ctypes.c_uint32.from_address(address)
    word.value = word.value + 1 + secrets.randbelow(0xFFFFFFFF)
    if _FUTEX_CALL is not None:
        _futex(address, _FUTEX_WAKE, 0x7FFFFFFF, None)


def _futex(address: int, operation: int, number: int, limit: object) -> None:
    words = (ctypes.c_long(_FUTEX_CALL or 0), ctypes.c_void_p(address), ctypes.c_long(operation), ctypes.c_long(number))
    LIBC.syscall(*words, limit, None, ctypes.c_long(0))


def _word(data: Bytes, at: int) -> int:
    if 0 <= at <= data.size - 4 and (address_of(data) + at) % 4 == 0:
        return address_of(data) + at
    raise ValueError(f"there is no word at byte {at} of {data.size}")
