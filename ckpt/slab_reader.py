"""Reading a box of a saved tensor into a box of another: only the blocks that it touches, each verified.

Whole blocks whose bytes lie together in the target are read straight into it. All others pass through a room of two
blocks, out of which numpy copies the box.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from math import prod
from typing import Any, NamedTuple

from resilio_hpc.ckpt import bulk_io
from resilio_hpc.ckpt.bulk_io import Segment
from resilio_hpc.ckpt.records import BLOCK_BYTES, TensorRecord, block
from resilio_hpc.ckpt.slab import Box, Shape
from resilio_hpc.ckpt.source import mismatch

ROOM_BYTES = 2 * BLOCK_BYTES
_READERS = 2
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Part(NamedTuple):
    """``box`` of a saved tensor goes to the equally large box that begins at ``start`` of ``target``.

    ``target``: contiguous memory of a tensor of ``shape`` with the same dtype.
    """

    fd: int
    record: TensorRecord
    box: Box
    target: memoryview
    shape: Shape
    start: Shape


def read_parts(step: int, parts: Sequence[Part], direct: bool, pool: ThreadPoolExecutor) -> None:
    """Read them all, a few at a time: each thread has room for two blocks. Errors as of ``SlabReader.read``."""
    left = sorted(parts, key=lambda part: (part.fd, part.record.offset), reverse=True)
    if not direct:
        for part in reversed(left):
            bulk_io.read_ahead(part.fd, *_extent(part))
    lock = threading.Lock()

    def read() -> None:
        reader = SlabReader(step, direct)
        while True:
            with lock:
                if not left:
                    return
                part = left.pop()
            reader.read(part)

    pending = [pool.submit(read) for _ in range(min(_READERS, len(left)))]
    wait(pending)
    for future in pending:
        future.result()


class SlabReader:
    """Reads parts, one after the other; one per thread, since it has room for two blocks."""

    def __init__(self, step: int, direct: bool) -> None:
        self._step, self._direct = step, direct
        self._room = memoryview(mmap.mmap(-1, ROOM_BYTES))
        self._held: tuple[int, TensorRecord | None, int, int] = (-1, None, 0, 0)

    def read(self, part: Part) -> None:
        """Raises CorruptCheckpoint for bytes that are not as they were written, OSError for a device that fails."""
        if not part.box.size:
            return
        if not part.record.shape:
            box = Box((0,), (1,))
            record = part.record
            part = Part(part.fd, record, box, part.target, (1,), (0,))
        if self._is_one_run(part):
            self._read_run(part)
        else:
            self._read_box(part)

    # -- one run of bytes --------------------------------------------------------------------------------------------

    @staticmethod
    def _is_one_run(part: Part) -> bool:
        """Are the bytes of the box one piece, in the file and in the target?"""
        saved = part.record.shape or (1,)
        outer = next((number for number, length in enumerate(part.box.shape) if length > 1), len(saved) - 1)
        inner = slice(outer + 1, None)
        return part.box.shape[inner] == saved[inner] == part.shape[inner]

    def _read_run(self, part: Part) -> None:
        item = _item(part.record)
        first = _flat(part.box.start, part.record.shape or (1,)) * item
        to = _flat(part.start, part.shape) * item
        end = first + part.box.size * item
        segments = []
        for number in range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            begin, size = block(part.record.size_bytes, number)
            if first <= begin and begin + size <= end:
                target = part.target[to + begin - first : to + begin - first + size]
                segments.append(Segment(part.record.offset + begin, target, part.record.checksums[number]))
                continue
            data = self._blocks(part, number, number)
            low, high = max(first, begin), min(end, begin + size)
            part.target[to + low - first : to + high - first] = data[low - begin : high - begin]
        for bad in bulk_io.read(part.fd, segments, self._direct):
            raise mismatch(self._step, part.record, segments[bad].offset - part.record.offset)

    # -- a box of it -------------------------------------------------------------------------------------------------

    def _read_box(self, part: Part) -> None:
        import numpy  # agents, which import this package, have no use for it

        saved, item = part.record.shape, _item(part.record)
        level = next(level for level in range(len(saved)) if prod(saved[level + 1 :]) * item <= BLOCK_BYTES)
        unit = numpy.dtype(_UNITS.get(item, f"V{item}"))
        row_bytes = prod(saved[level + 1 :]) * item
        columns = tuple(_range(part.box, number) for number in range(level + 1, len(saved)))
        target = numpy.frombuffer(part.target, dtype=unit).reshape(part.shape)
        for outer in product(*(range(*_range(part.box, number).indices(saved[number])) for number in range(level))):
            base = _flat((*outer, 0), saved[: level + 1]) * row_bytes
            into = target[_shifted(outer, part, level)]
            for first, count in self._windows(base, part.box.start[level], part.box.shape[level], row_bytes):
                begin, end = base + first * row_bytes, base + (first + count) * row_bytes
                number, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
                data = self._blocks(part, number, last)
                at = begin - number * BLOCK_BYTES
                rows = numpy.frombuffer(data, dtype=unit, count=(end - begin) // item, offset=at)
                rows = rows.reshape(count, *saved[level + 1 :])[(slice(None), *columns)]
                to = part.start[level] + first - part.box.start[level]
                inner = tuple(
                    slice(part.start[number], part.start[number] + part.box.shape[number])
                    for number in range(level + 1, len(saved))
                )
                into[(slice(to, to + count), *inner)] = rows

    @staticmethod
    def _windows(base: int, first: int, count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows by (first, count), each time as many as lie within two blocks."""
        end = first + count
        while first < end:
            limit = ((base + first * row_bytes) // BLOCK_BYTES + 2) * BLOCK_BYTES
            up_to = min(end, (limit - base) // row_bytes)
            yield first, up_to - first
            first = up_to

    def _blocks(self, part: Part, first: int, last: int) -> memoryview:
        """One block or two, verified. One that is here from the last time is not read again."""
        fd, record, low, high = self._held
        same = fd == part.fd and record is part.record
        if same and low <= first and last <= high:
            return self._room[(first - low) * BLOCK_BYTES :]
        begin = first
        if same and first == high:
            kept = block(part.record.size_bytes, first)[1]
            self._room[:kept] = self._room[(first - low) * BLOCK_BYTES : (first - low) * BLOCK_BYTES + kept]
            begin = first + 1
        self._held = (-1, None, 0, 0)
        segments = []
        for number in range(begin, last + 1):
            at, size = block(part.record.size_bytes, number)
            room = self._room[(number - first) * BLOCK_BYTES : (number - first) * BLOCK_BYTES + size]
            segments.append(Segment(part.record.offset + at, room, part.record.checksums[number]))
        for bad in bulk_io.read(part.fd, segments, self._direct):
            raise mismatch(self._step, part.record, (begin + bad) * BLOCK_BYTES)
        self._held = (part.fd, part.record, first, last)
        return self._room


def _extent(part: Part) -> tuple[int, int]:
    """Offset in the file and size of the blocks from the box's first byte to its last."""
    if not part.record.shape or not part.box.size:
        return part.record.offset, 0
    saved, item = part.record.shape, _item(part.record)
    first = _flat(part.box.start, saved) * item
    last = (
        _flat(tuple(at + length - 1 for at, length in zip(part.box.start, part.box.shape, strict=True)), saved) * item
    )
    begin, end = first // BLOCK_BYTES * BLOCK_BYTES, (last // BLOCK_BYTES + 1) * BLOCK_BYTES
    return part.record.offset + begin, min(end, part.record.size_bytes) - begin


def _item(record: TensorRecord) -> int:
    return record.size_bytes // prod(record.shape)


def _flat(index: Shape, shape: Shape) -> int:
    at = 0
    for position, length in zip(index, shape, strict=True):
        at = at * length + position
    return at


def _range(box: Box, number: int) -> slice:
    return slice(box.start[number], box.start[number] + box.shape[number])


def _shifted(outer: Shape, part: Part, level: int) -> Any:
    """An index of the saved tensor as one of the target."""
    pairs = zip(outer, part.box.start[:level], part.start[:level], strict=True)
    return tuple(to + index - first for index, first, to in pairs)
