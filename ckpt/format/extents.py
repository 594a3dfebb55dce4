"""Ranges of bytes of a file: the gaps between them, and their hash. Here: the HDF5 metadata around the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from resilio_hpc.ckpt.format.files import NewFile, ReadFile
from resilio_hpc.core.errors import CorruptCheckpoint

_PIECE_BYTES = 1 << 20


def gaps(extents: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield, in order, the (offset, size) of each gap between extents (offset, size) in a file of ``size`` bytes."""
    at = 0
    for offset, length in sorted(extents):
        if length and offset > at:
            yield at, min(offset, size) - at
        at = max(at, offset + length) if length else at
    if at < size:
        yield at, size - at


def hash_gaps(file: ReadFile | NewFile, extents: Iterable[tuple[int, int]], size: int) -> str:
    """Return the SHA-256, in hexadecimal, of the bytes of ``gaps`` and of their places.

    Raises CorruptCheckpoint, OSError.
    """
    digest = hashlib.sha256()
    for offset, length in gaps(extents, size):
        digest.update(f"{offset}+{length};".encode())
        for start in range(offset, offset + length, _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, offset + length - start)
            data = file.pread(wanted, start)
            if len(data) != wanted:
                raise CorruptCheckpoint("a shard file ends too early")
            digest.update(data)
    return digest.hexdigest()
