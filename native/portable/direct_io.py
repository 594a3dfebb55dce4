"""Large transfers between memory and a file, one after the other, verified on the way.

Meant for files that are opened with O_DIRECT. What the extension does with io_uring is done here as it does it without.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from resilio_hpc.native.portable.buffers import Bytes, bytes_of, numbers
from resilio_hpc.native.portable.checksum import crc32c
from resilio_hpc.native.portable.segments import FileRange, file_ranges

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PAGE = 4096
_MAX_DEPTH = 64
_GAP_BYTES = 128 << 10  # bytes between two segments that are read rather than skipped: a request costs as much
_FENCE = threading.Lock()
_LATE_S = 0.1  # a writer that has fallen behind its bandwidth by more does not make up for it


def is_concurrent() -> bool:
    """Return whether several transfers are made at a time."""
    return False


def write(
    fd: int,
    memory: Buffer,
    pieces: Sequence[tuple[int, int, int]],
    blocks: Sequence[tuple[int, int, int]],
    depth: int,
    chunk_bytes: int,
    bytes_per_s: float,
    concurrent: bool,
    stalled_s: float = 3,
    /,
) -> int:
    """Write pieces (start, offset, size); return the number of the first block that is not as it should be, or -1.

    A block (start, checksum, size) is verified before its first byte is written. Raises OSError.
    """
    _check(depth, chunk_bytes)
    data = bytes_of(memory)
    runs = [_within(number, item, data.size) for number, item in enumerate(_listed(pieces))]
    checks = [_within(number, item, data.size) for number, item in enumerate(_listed(blocks))]
    verified = 0
    due = time.monotonic()
    for start, offset, size in runs:
        for at in range(0, size, chunk_bytes):
            count = min(chunk_bytes, size - at)
            while verified < len(checks) and checks[verified][0] < start + at + count:
                if not _matches(data, checks[verified]):
                    return verified
                verified += 1
            if bytes_per_s > 0:
                time.sleep(max(0.0, due - time.monotonic()))
                due = max(due, time.monotonic() - _LATE_S) + count / bytes_per_s
            _write_all(fd, data[start + at : start + at + count], offset + at)
    for number in range(verified, len(checks)):
        if not _matches(data, checks[number]):
            return number
    if bytes_per_s > 0:
        time.sleep(max(0.0, due - time.monotonic()))  # another call may follow at once
    return -1


def read(
    fd: int,
    segments: Sequence[Any],
    depth: int,
    chunk_bytes: int,
    concurrent: bool,
    stalled_s: float = 3,
    /,
) -> list[int]:
    """Fill the targets; return the numbers of segments that are not as they should be. Raises OSError (ENODATA)."""
    _check(depth, chunk_bytes)
    wanted = file_ranges(segments)
    room = bytes_of(mmap.mmap(-1, chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # begins at a page
    for window in _windows(wanted, chunk_bytes):
        _read_all(fd, room[: -(-(window.end - window.start) // _PAGE) * _PAGE], window)
        for number, at, count in window.parts:
            one = wanted[number]
            data = room[one.offset + at - window.start :][:count]
            one.place(at, data)
            one.verify(data)
    return _bad(wanted)


def read_cached(fd: int, segments: Sequence[Any], chunk_bytes: int, /) -> list[int]:
    """Do as ``read``, through the page cache or from a file in memory."""
    _check(1, chunk_bytes)
    wanted = file_ranges(segments)
    room = np.empty(chunk_bytes if any(not one.is_whole for one in wanted) else 0, dtype=np.uint8)
    for one in wanted:
        at = 0
        while at < one.size:
            into = one.target[at:] if one.is_whole else room[: one.size - at]
            count = os.preadv(fd, [into.data], one.offset + at)
            if count == 0:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            if not one.is_whole:
                one.place(at, room[:count])
                one.verify(room[:count])
            at += count
        if one.is_whole:
            one.verify(one.target)
    return _bad(wanted)


def copy_segments(memory: Buffer, segments: Sequence[Any], /) -> None:
    """Copy what belongs to segments out of a file that is mapped, and was verified by the process that put it there."""
    data = bytes_of(memory)
    wanted = file_ranges(segments)
    for number, one in enumerate(wanted):
        if one.end > data.size:
            raise ValueError(f"segment {number} ends behind the memory")
    for one in wanted:
        one.place(0, data[one.offset : one.end])
    # What the caller looks at next in shared memory was so after the copies: these come before the first release of
    # the lock, and what follows comes after it is acquired again.
    for _ in range(2):
        with _FENCE:
            continue


class _Window(NamedTuple):
    """One read, of whole pages: which bytes of the file, and what of which segments they are: (number, at, count)."""

    start: int
    end: int
    parts: list[tuple[int, int, int]]


def _windows(wanted: Sequence[FileRange], chunk_bytes: int) -> Iterator[_Window]:
    """Yield reads of a chunk at most, neighbouring segments together."""
    window = _Window(0, 0, [])
    for number, one in enumerate(wanted):
        at = 0
        while at < one.size:
            begin = one.offset + at
            if window.parts and (begin > window.end + _GAP_BYTES or begin >= window.start + chunk_bytes):
                yield window
                window = _Window(0, 0, [])
            if not window.parts:
                window = _Window(begin & -_PAGE, begin, [])
            end = min(one.end, window.start + chunk_bytes)
            window.parts.append((number, at, end - begin))
            window = window._replace(end=end)
            at = end - one.offset
    if window.parts:
        yield window


def _read_all(fd: int, room: Bytes, window: _Window) -> None:
    done = 0
    while done < window.end - window.start:
        count = os.preadv(fd, [room[done:].data], window.start + done)
        if count == 0:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        done += count


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    done = 0
    while done < data.size:
        count = os.pwrite(fd, data[done:].data, offset + done)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def _bad(wanted: Sequence[FileRange]) -> list[int]:
    return [number for number, one in enumerate(wanted) if not one.is_as_it_should_be]


def _matches(data: Bytes, block: tuple[int, ...]) -> bool:
    start, crc, size = block
    return crc32c(data[start : start + size].data) == crc & 0xFFFFFFFF


def _listed(items: Sequence[Any]) -> list[Any]:
    try:
        return list(items)
    except TypeError:
        raise TypeError("expected a sequence of (start, offset, size)") from None


def _within(number: int, item: object, memory_size: int) -> tuple[int, ...]:
    start, offset, size = numbers(item, 3)
    if min(start, offset, size) < 0 or start + size > memory_size:
        raise ValueError(f"item {number} does not lie within the memory")
    return start, offset, size


def _check(depth: int, chunk_bytes: int) -> None:
    if not (1 <= depth <= _MAX_DEPTH and _PAGE <= chunk_bytes <= 1 << 30 and chunk_bytes % _PAGE == 0):
        raise ValueError(f"depth must be 1 to {_MAX_DEPTH}, the chunk a multiple of {_PAGE} up to 1 GiB")
