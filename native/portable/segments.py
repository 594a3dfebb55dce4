"""What is read: ranges of bytes of a file, each with its checksum, and where they go.

All of them go into a target, or, run by run, those that belong to a box of the tensor that they are a part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from resilio_hpc.native.portable.buffers import Bytes, bytes_of, numbers
from resilio_hpc.native.portable.checksum import crc32c

_FAR = (1 << 63) // 4  # further than any file reaches
_MAX_LEVELS = 32
_MAX_RUN = 1 << 30  # of an element of an array


class _Level(NamedTuple):
    """``repeats`` runs, or groups of them, so far apart in the tensor and in the target."""

    repeats: int
    source_step: int
    target_step: int


class _Box(NamedTuple):
    """Runs of ``run`` bytes: where the first begins in the tensor and in the target, and the levels from outermost on.

    ``extents``: how many bytes of the tensor the box, one of its groups, and so on to a run, go over.
    """

    first: int
    target_first: int
    run: int
    levels: list[_Level]
    extents: list[int]


class FileRange:
    """A segment: its bytes in the file, its place, and the checksum of what has come of it so far."""

    def __init__(self, item: Any) -> None:
        """Read (offset, target, checksum), or with a box (offset, target, checksum, size, at, box).

        Raises TypeError, and ValueError for what lies in no file or not in the target.
        """
        if not isinstance(item, tuple) or len(item) not in (3, 6):
            raise TypeError("a segment is (offset, target, checksum), or that with (size, at, box)")
        self.offset, self._wanted = numbers((item[0], item[2]), 2)
        self.target = bytes_of(item[1], True)
        self.size, self._at = numbers(item[3:5], 2) if len(item) == 6 else (self.target.size, 0)
        self._box = _box(item[5], self.target.size) if len(item) == 6 else None
        self._crc = 0
        if not (0 <= self.offset <= _FAR and 0 <= self.size <= _FAR and 0 <= self._at <= _FAR):
            raise ValueError("a segment lies further behind than any file reaches")

    @property
    def end(self) -> int:
        """Return where its bytes end in the file."""
        return self.offset + self.size

    @property
    def is_whole(self) -> bool:
        """Return whether all its bytes go to the target."""
        return self._box is None

    @property
    def is_as_it_should_be(self) -> bool:
        """Return whether its bytes match the checksum."""
        return self._crc == self._wanted & 0xFFFFFFFF

    def place(self, at: int, data: Bytes) -> None:
        """Copy its bytes from ``at`` on to their places."""
        if self._box is None:
            np.copyto(self.target[at : at + data.size], data)
        else:
            _scatter(self._box, self.target, self._at + at, data)

    def verify(self, data: Bytes) -> None:
        """Take its next bytes into the checksum."""
        self._crc = crc32c(data.data, self._crc)


def file_ranges(items: Sequence[Any]) -> list[FileRange]:
    """Return the segments, which are in order. Raises TypeError, ValueError."""
    found = [FileRange(item) for item in items]
    ends = accumulate(found, lambda end, one: max(end, one.end), initial=0)
    for number, (one, end) in enumerate(zip(found, ends, strict=False)):
        if one.offset < end:
            raise ValueError(f"segment {number} begins before the end of the one before")
    return found


def _box(item: object, target_size: int) -> _Box:
    if not isinstance(item, tuple) or len(item) != 4 or not isinstance(item[3], tuple):
        raise TypeError("a box is (first, target_first, run, levels)")
    first, target_first, run = numbers(item[:3], 3)
    levels = [_Level(*numbers(level, 3)) for level in item[3]]
    if not 1 <= len(levels) <= _MAX_LEVELS:
        raise ValueError(f"a box has 1 to {_MAX_LEVELS} levels, not {len(levels)}")
    extents, target_end = [run], target_first + run
    is_sound = min(first, target_first) >= 0 and run >= 1
    for level in reversed(levels):
        is_sound &= level.repeats >= 1 and level.source_step >= extents[0] and level.target_step >= 0
        extents.insert(0, (level.repeats - 1) * level.source_step + extents[0])
        target_end += (level.repeats - 1) * level.target_step
    if not is_sound or target_end > target_size or first + extents[0] >= 1 << 63:
        raise ValueError("a box does not lie within its target, or its levels overlap")
    return _Box(first, target_first, run, levels, extents)


def _scatter(box: _Box, target: Bytes, at: int, data: Bytes) -> None:
    """Copy what belongs to the box out of ``data``, the bytes of its tensor from ``at`` on."""
    end = at + data.size

    def put(depth: int, source: int, to: int) -> None:
        extent = box.extents[depth]
        if source >= end or source + extent <= at:
            return
        if depth == len(box.levels):
            low, high = max(source, at), min(source + extent, end)
            np.copyto(target[to + low - source : to + high - source], data[low - at : high - at])
            return
        level, inner = box.levels[depth], box.extents[depth + 1]
        low = max(0, -((source - at) // level.source_step))  # the first group that lies within the data
        high = min(level.repeats, (end - source - inner) // level.source_step + 1)  # the one behind the last such
        edges = {low - 1, high}
        if low < high and box.run >= _MAX_RUN:
            edges.update(range(low, high))
        elif low < high:
            shape = [high - low, *(each.repeats for each in box.levels[depth + 1 :])]
            steps = [[each[side] for each in box.levels[depth:]] for side in (1, 2)]
            kind = np.dtype(f"V{box.run}")
            begin = source + low * level.source_step - at
            part = np.ndarray(shape, kind, data, begin, steps[0])
            np.copyto(np.ndarray(shape, kind, target, to + low * level.target_step, steps[1]), part)
        for number in edges:
            if 0 <= number < level.repeats:
                put(depth + 1, source + number * level.source_step, to + number * level.target_step)

    put(0, box.first, box.target_first)
