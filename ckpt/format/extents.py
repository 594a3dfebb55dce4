"""Ranges of bytes of a file: the gaps between them, and their hash. Here: the HDF5 metadata around the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from resilio_hpc.ckpt.format.files import NewFile, ReadFile
from resilio_hpc.core.errors import CorruptCheckpoint

_PIECE_BYTES = 1 << 20
_AT_ONCE = 32
Together = Callable[..., list[Any]]


def in_order(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls, made one after the other."""
    return [call() for call in calls]


def gaps(extents: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield, in order, the (offset, size) of each gap between extents (offset, size) in a file of ``size`` bytes."""
    at = 0
    for offset, length in sorted(extents):
        if length and offset > at:
            yield at, min(offset, size) - at
        at = max(at, offset + length) if length else at
    if at < size:
        yield at, size - at


def hash_gaps(
    file: ReadFile | NewFile, extents: Iterable[tuple[int, int]], size: int, together: Together = in_order
) -> str:
    """Return the SHA-256, in hexadecimal, of the bytes of ``gaps`` and of their places.

    ``together``: see ``Store``. Raises CorruptCheckpoint, OSError.
    """
    digest, pieces = hashlib.sha256(), _pieces(extents, size)
    while some := list(islice(pieces, _AT_ONCE)):
        found = together(*(partial(file.pread, wanted, start) for _, start, wanted in some))
        for (name, _, wanted), data in zip(some, found, strict=True):
            if len(data) != wanted:
                raise CorruptCheckpoint("a shard file ends too early")
            digest.update(name)
            digest.update(data)
    return digest.hexdigest()


def _pieces(extents: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (place of the gap that begins here, start, size) of all reads."""
    for offset, length in gaps(extents, size):
        name = f"{offset}+{length};".encode()
        for start in range(offset, offset + length, _PIECE_BYTES):
            yield name, start, min(_PIECE_BYTES, offset + length - start)
            name = b""
