"""Large writes and reads of one file, verified on the way, past the page cache where the file system allows it.

The cache spreads a large write over seconds (dirty pages are throttled) and costs a large read one more copy. A file
system may refuse O_DIRECT when the file is opened or only when it is used; then everything goes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import direct_io

WRITE_CHUNK_BYTES, WRITE_DEPTH = 8 << 20, 4
READ_CHUNK_BYTES, READ_DEPTH = 4 << 20, 4  # per thread: as many bytes wait in memory for their copy
_AHEAD_BYTES = 128 << 10  # the kernel cuts a longer range off where a device's readahead is short
_FAR_KIB = 2048
ROOM_BYTES = 64 << 20  # memory for a block-by-block reader or writer: as many blocks as fit are in flight
CACHED_CHUNK_BYTES = 256 << 10  # stays in the processor's cache between its copy and its checksum

Result = TypeVar("Result")


class PageRun(NamedTuple):
    """Bytes from ``start`` of the memory go to ``offset`` of the file. All three are multiples of a page."""

    start: int
    offset: int
    size: int


class Block(NamedTuple):
    """Bytes from ``start`` of the memory must have this CRC32C."""

    start: int
    crc32c: int
    size: int


class Segment(NamedTuple):
    """Bytes from ``offset`` of the file go to ``target`` and must have this CRC32C."""

    offset: int
    target: memoryview
    crc32c: int


Strides = tuple[int, int, int, tuple[tuple[int, int, int], ...]]
"""Runs of bytes: where the first begins in a tensor and in the target, the size of each, and from the outermost level
on (how many, how far apart in the tensor, how far apart in the target)."""


class BoxSegment(NamedTuple):
    """``size`` bytes from ``offset`` of the file, a tensor's from ``start`` on, must have this CRC32C.

    Those of them that belong to ``strides`` go to their places in ``target``.
    """

    offset: int
    target: memoryview
    crc32c: int
    size: int
    start: int
    strides: Strides


def write(
    fd: int, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
) -> int | None:
    """Write ``pieces`` to a file; before that, verify ``blocks`` (by ``start``), if given.

    ``bytes_per_s``: the limit of speed; 0: none. Return the index of the first block that does not match, else None; a
    file with a bad block must not be used. Raises OSError. Nothing is synced.
    """
    bad = _direct_or_cached(
        fd,
        os.O_WRONLY,
        lambda file: direct_io.write(file, memory, pieces, blocks, WRITE_DEPTH, WRITE_CHUNK_BYTES, bytes_per_s, True),
    )
    return None if bad < 0 else bad


def read(fd: int, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
    """Fill every target; return the indices of those that do not match their checksum and must not be used.

    ``segments`` by offset. ``direct`` False: through the page cache, because other processes of this node read the
    same, or because the file is in memory. Raises CorruptCheckpoint for segments that overlap, OSError, with ENODATA
    for a file that ends too early.
    """
    check_apart(segments)

    def act(file: int) -> list[int]:
        return direct_io.read(file, segments, READ_DEPTH, READ_CHUNK_BYTES, True)

    if not direct:
        return direct_io.read_cached(fd, segments, CACHED_CHUNK_BYTES)
    return _direct_or_cached(fd, os.O_RDONLY, act)


def check_apart(segments: Sequence[Segment | BoxSegment]) -> None:
    """Raise CorruptCheckpoint for segments that overlap, or are not sorted by offset."""
    if any(one.offset + size_of(one) > other.offset for one, other in pairwise(segments)):
        raise CorruptCheckpoint("two tensors of the checkpoint share bytes of a file")


def size_of(segment: Segment | BoxSegment) -> int:
    """Return its number of bytes in the file."""
    return segment.size if isinstance(segment, BoxSegment) else len(segment.target)


def read_ahead(fd: int, offset: int, size: int) -> None:
    """Let the kernel read a range into the page cache in the background. Raises OSError."""
    for at in range(offset, offset + size, _AHEAD_BYTES):
        os.posix_fadvise(fd, at, min(_AHEAD_BYTES, offset + size - at), os.POSIX_FADV_WILLNEED)


def is_read_ahead_far(fd: int) -> bool:
    """Return whether the kernel's own readahead on that device is long enough.

    It then takes larger pages than for ``read_ahead``, and each read of them costs about half as much.
    """
    device = os.fstat(fd).st_dev
    for name in (f"{os.major(device)}:{os.minor(device)}/queue", f"{os.major(device)}:{os.minor(device)}/../queue"):
        try:
            return int(Path(f"/sys/dev/block/{name}/read_ahead_kb").read_text()) >= _FAR_KIB
        except (OSError, ValueError):
            continue  # a partition, or no disk of this machine
    return False


def write_cached(fd: int, data: memoryview, offset: int) -> None:
    """Write all of it through the page cache. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def open_direct(fd: int) -> int:
    """Open a file once more, to read it past the page cache if possible. Raises OSError."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)


def is_direct(fd: int) -> bool:
    """Write the first page of a file again past the page cache; return False where that is refused. Raises OSError."""
    room = memoryview(mmap.mmap(-1, PAGE))
    os.pwrite(fd, room, 0)
    refused = []

    def act(file: int) -> None:
        if not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
        else:
            direct_io.write(file, room, [PageRun(0, 0, PAGE)], [], 1, WRITE_CHUNK_BYTES, 0.0, True)

    _direct_or_cached(fd, os.O_WRONLY, act)
    return not refused


def _direct_or_cached(fd: int, mode: int, act: Callable[[int], Result]) -> Result:
    try:
        file = os.open(f"/proc/self/fd/{fd}", mode | os.O_DIRECT | os.O_CLOEXEC)
        try:
            return act(file)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # it is refused at the open, or at the first use
            raise
    return act(fd)
