"""The copies of a snapshot from devices, with the checksums of their blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from resilio_hpc.ckpt.devices.interface import CopiesOut, Mark
from resilio_hpc.ckpt.format.manifest import blocks
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c

_SHARE_BYTES = 32 << 20
_PART_BYTES = 16 << 20  # the device needs as much memory again for a tensor that is not contiguous
"""Checksums of so much are computed in one go, while more is arriving."""


class ChecksumSlot(NamedTuple):
    """Where the checksum of one block goes."""

    checksums: list[int]
    number: int


Begun = tuple[list[ChecksumSlot], Future[list[int]]]
"""Copies under way: where the checksums of their blocks go, and, once they are complete, these."""


class Transfer(NamedTuple):
    """A tensor of a device, the byte ``at`` of the arena where it goes, and the slots of its blocks' checksums."""

    value: Any
    at: int
    checksums: list[int]


class DeviceCopies:
    """The copies of one snapshot from devices into its arena, ``room``."""

    def __init__(self, device: CopiesOut, room: memoryview, pool: ThreadPoolExecutor) -> None:
        self._device, self._room, self._pool = device, room, pool
        self._marks: dict[Any, Mark] = {}

    def follow(self, where: Any) -> None:
        """Let copies see the results of this device's current stream so far. Raises CheckpointError."""
        with _failures():
            self._device.follow(where)
            self._marks[where] = self._device.mark(where)

    def begin(self, where: Any, transfers: Iterable[Transfer]) -> list[Begun]:
        """Begin to copy tensors of one device, after ``follow``. Raises CheckpointError, and so do the results."""
        begun: list[Begun] = []
        slots: list[ChecksumSlot] = []
        extents: list[tuple[int, int]] = []
        waiting_bytes = 0

        def submit() -> None:
            nonlocal slots, extents, waiting_bytes
            with _failures():
                self._marks[where] = mark = self._device.mark(where)
            begun.append((slots, self._pool.submit(self._checksums, mark, extents)))
            slots, extents, waiting_bytes = [], [], 0

        for value, at, checksums in transfers:
            done, number, ends = 0, 0, blocks(value.nbytes)
            for part in parts(value, _PART_BYTES):
                with _failures(lambda: self._device.free_bytes(where)):
                    self._device.copy(part, self._room[at + done : at + done + part.nbytes])
                done += part.nbytes
                while number < len(ends) and sum(ends[number]) <= done:
                    start, size = ends[number]
                    slots.append(ChecksumSlot(checksums, number))
                    extents.append((at + start, size))
                    waiting_bytes += size
                    number += 1
                if waiting_bytes >= _SHARE_BYTES:
                    submit()
        if slots:
            submit()
        return begun

    def hold(self) -> None:
        """Hold the devices: they change nothing until they have copied what was begun."""
        for where, mark in self._marks.items():
            self._device.hold(where, mark)

    def settle(self) -> None:
        """Wait for the devices, so that nothing is written to the arena any more, whatever went wrong."""
        for where in self._marks:
            with contextlib.suppress(RuntimeError):  # a device that failed writes nothing either
                self._device.mark(where).wait()

    def _checksums(self, mark: Mark, extents: list[tuple[int, int]]) -> list[int]:
        with _failures():
            mark.wait()
        return [crc32c(self._room[at : at + size]) for at, size in extents]


@contextlib.contextmanager
def _failures(free_bytes: Callable[[], int | None] | None = None) -> Iterator[None]:
    """Turn torch's errors into CheckpointError: of a device that fails, or that has no memory for a part."""
    try:
        yield
    except RuntimeError as error:
        free = None
        if free_bytes is not None:
            with contextlib.suppress(RuntimeError):  # of a device that failed
                free = free_bytes()
        room = "" if free is None else f" ({free >> 20} MiB are free there)"
        raise CheckpointError(f"a tensor cannot be copied from its device: {error}{room}") from error


def parts(value: Any, size_bytes: int) -> Iterator[Any]:
    """Yield the tensor in parts, in row-major order, of at most that size (or an element); none of an empty one.

    The copy of a part that is not contiguous takes as much memory of the device.
    """
    if not value.nbytes:
        return
    if value.nbytes <= size_bytes:
        yield value
    elif value.is_contiguous():
        yield from value.reshape(-1).split(max(1, size_bytes // value.itemsize))
    elif rows := size_bytes * len(value) // value.nbytes:
        yield from value.split(rows)
    else:
        for row in value:
            yield from parts(row, size_bytes)
