"""What a rank leaves at each step boundary in shared memory, for the case that it is killed in the next step.

Where ranks hold the same tensors, another rank's snapshot of that step and this record give the lost rank's state. A
file holds three records: of the last two boundaries, and one that is made before the optimizer's step, which ends most
steps. A record is only read when its checksum is right, so its writer may be killed at any instant.
The record of a step that another rank's snapshot has given back is kept in a file of its own, for as long as training
may have to go back there.

This module needs neither torch nor h5py: the agent uses it.
"""

from __future__ import annotations

import errno
import os
import struct
import weakref
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from resilio_hpc.ckpt.format.manifest import Count
from resilio_hpc.native import crc32c

_MAGIC = b"RESIL-BR"
_VERSION = 1
_HEADER = struct.Struct("<8s2I q 4I")  # magic, version, is early, step, world size, round, size and CRC of the part
_CRC = struct.Struct("<I")  # of the header
_SLOTS = 3
ROOM = 1 << 20
"""Bytes for one record: more is not recorded."""


Stamp = tuple[int, int, bool, int]
"""Round, step, is early, checksum."""


class BoundaryRecord(Struct, frozen=True, array_like=True):
    """What is a rank's own after ``step`` steps, as ``ckpt.state.own_part`` encodes it.

    ``is_early``: made before the optimizer's step that ends step number ``step``, not at the boundary.
    """

    step: Count
    world_size: Count
    round: Count
    is_early: bool
    part: bytes

    @property
    def order(self) -> tuple[int, int, bool]:
        """Return what is larger for newer records; of two of one step, for the one at the boundary."""
        return self.round, self.step, not self.is_early

    @property
    def stamp(self) -> Stamp:
        """Return what tells this record from others of its rank."""
        return self.round, self.step, self.is_early, crc32c(self.part)


def record_path(directory: Path, rank: int) -> Path:
    """Return a rank's file in the directory of arenas."""
    return directory / f"rank{rank}.boundary"


def kept_path(directory: Path, rank: int) -> Path:
    """Return the file with the one record that is kept."""
    return directory / f"rank{rank}.kept"


def keep_record(directory: Path, rank: int, record: BoundaryRecord) -> None:
    """Keep a record beyond the boundaries that follow, in place of the one that was kept. Raises OSError."""
    path = kept_path(directory, rank)
    written = path.with_suffix(".new")
    written.write_bytes(_start(record) + record.part)
    written.replace(path)


class RecordWriter:
    """Writes one rank's records. Raises OSError where there is no room for the file."""

    def __init__(self, directory: Path, rank: int, world_size: int, round_number: int) -> None:
        """Begin a new file: records of another life would mix with this one's."""
        self._place = world_size, round_number
        path = record_path(directory, rank)
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)

    def write(self, step: int, part: bytes, is_early: bool) -> None:
        """Replace the oldest record; do nothing for a part that is too large. Raises OSError.

        By calls, since a write to mapped memory would end the rank where shared memory is full.
        """
        at_start = (2 if is_early else step % 2) * ROOM
        if len(part) > ROOM - _HEADER.size - _CRC.size:
            return
        start = _start(BoundaryRecord(step, *self._place, is_early, part))
        for data, at in (
            (bytes(len(start)), at_start),  # what is written over is valid no more
            (part, at_start + len(start)),
            (start, at_start),
        ):
            if os.pwrite(self._file, data, at) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _start(record: BoundaryRecord) -> bytes:
    """Return the bytes before a record's part."""
    header = _HEADER.pack(
        _MAGIC, _VERSION, record.is_early, record.step, record.world_size, record.round, len(record.part),
        crc32c(record.part),
    )  # fmt: skip
    return header + _CRC.pack(crc32c(header))


def read_records(path: Path, known: Collection[Stamp] = ()) -> list[BoundaryRecord]:
    """Return the whole records of a file that are not ``known``, in the order of ``BoundaryRecord.order``."""
    found = []
    try:
        with path.open("rb", buffering=0) as file:
            for slot in range(_SLOTS):
                record = _read(file.fileno(), slot * ROOM, known)
                if record is not None:
                    found.append(record)
    except OSError:
        return []
    return sorted(found, key=lambda record: record.order)


def _read(file: int, at: int, known: Collection[Stamp]) -> BoundaryRecord | None:
    start = os.pread(file, _HEADER.size + _CRC.size, at)
    header = start[: _HEADER.size]
    if len(start) < _HEADER.size + _CRC.size or _CRC.unpack_from(start, _HEADER.size)[0] != crc32c(header):
        return None
    magic, version, early, step, world, round_number, size, crc = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION or size > ROOM or step < 0 or (round_number, step, early, crc) in known:
        return None
    part = os.pread(file, size, at + len(start))
    if len(part) != size or crc32c(part) != crc:
        return None
    return BoundaryRecord(step, world, round_number, bool(early), part)
