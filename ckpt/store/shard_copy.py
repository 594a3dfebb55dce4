"""Copies a shard file in bounded memory, and verifies each byte between its read and its write."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.format.bulk_io import PageRun, Segment
from resilio_hpc.ckpt.format.extents import gaps, hash_gaps
from resilio_hpc.ckpt.format.files import NewFile, ReadFile
from resilio_hpc.ckpt.format.manifest import Extent, ShardRecord
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c

_ROOM_BYTES = (16 << 20) + PAGE  # beside arenas, where memory may be short; a block begins anywhere in its page
_PIECE_BYTES = 1 << 20


class _Block(NamedTuple):
    """A block of a tensor in the file."""

    offset: int
    size: int
    crc32c: int
    tensor: str


def copy_shard(
    source: Path, shard: ShardRecord, target: Path, bytes_per_s: float = 0.0, recycled: Path | None = None
) -> None:
    """Copy a shard file, not a link, from one directory to another, durable on return.

    ``bytes_per_s``: see ``bulk_io.write``; ``recycled``: see ``write_shard``. Its buffer is 16 MiB, beside that of
    ``bulk_io``. Raises CorruptCheckpoint when the file in ``source`` is damaged or cannot be read, OSError for
    ``target``; nothing remains there then.
    """
    former = None if recycled is None else recycled / shard.file
    store = store_of(target)
    store.check_space(target, shard.size_bytes, former)
    with contextlib.ExitStack() as stack:
        with _reading(source):
            reader = stack.enter_context(ShardReader(source, shard, follow=False))
            tables = [reader.table(rank) for rank in shard.ranks]
        parts = sorted(
            _Block(tensor.offset + start, size, checksum, tensor.path)
            for table in tables
            for tensor in table.tensors
            if tensor.offset >= 0
            for (start, size), checksum in zip(tensor.blocks(), tensor.checksums, strict=True)
        )
        named = [rank.table for rank in shard.ranks] + [table.tree for table in tables]
        file = stack.enter_context(store.new_file(target / shard.file, former=former))
        file.allocate(shard.size_bytes)
        _copy_rest(reader.file, file, parts, named, shard, source)
        _copy_blocks(reader.file, file, parts, source, bytes_per_s)  # last: see ``s3_files.S3NewFile``


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn read errors into CorruptCheckpoint, so that it is known which of two file systems has failed."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(f"{source} cannot be read: {error.strerror}") from error


def _copy_blocks(read: ReadFile, write: NewFile, parts: Sequence[_Block], source: Path, bytes_per_s: float) -> None:
    """Copy whole pages past the page cache, through a buffer with the same alignment to pages as the file."""
    room = memoryview(mmap.mmap(-1, _ROOM_BYTES))
    for some in _batches(parts):
        segments = [Segment(part.offset, room[at : at + part.size], part.crc32c) for at, part in some]
        with _reading(source):
            bad = read.read(segments)
        if bad:
            raise CorruptCheckpoint(f"{source}: tensor {some[bad[0]][1].tensor} does not match its checksum")
        pieces: list[PageRun] = []
        for start, offset, size in _runs(some):
            head = min(-offset % PAGE, size)
            whole = (size - head) // PAGE * PAGE
            if whole:
                pieces.append(PageRun(start + head, offset + head, whole))
            write.write_small(room[start : start + head], offset)
            write.write_small(room[start + head + whole : start + size], offset + head + whole)
        write.write(room, pieces, [], bytes_per_s)


def _batches(parts: Sequence[_Block]) -> Iterator[list[tuple[int, _Block]]]:
    """Yield blocks and their places in the buffer, as many at a time as it holds."""
    some: list[tuple[int, _Block]] = []
    at = 0
    for part in parts:
        at += (part.offset - at) % PAGE
        if some and at + part.size > _ROOM_BYTES:
            yield some
            some, at = [], part.offset % PAGE
        some.append((at, part))
        at += part.size
    if some:
        yield some


def _runs(some: Sequence[tuple[int, _Block]]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the buffer, offset in the file, size) of neighbours in both."""
    start, end = some[0][0], some[0][0]
    offset = some[0][1].offset
    for at, part in some:
        if (at, part.offset) != (end, offset + end - start):
            yield start, offset, end - start
            start, end, offset = at, at, part.offset
        end += part.size
    yield start, offset, end - start


def _copy_rest(
    read: ReadFile, write: NewFile, parts: Sequence[_Block], named: Sequence[Extent], shard: ShardRecord, source: Path
) -> None:
    """Copy HDF5's metadata, tables and trees, which are small. They are verified in the copy."""
    used = [(part.offset, part.size) for part in parts]
    for offset, size in gaps(used, shard.size_bytes):
        for start in range(offset, offset + size, _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, offset + size - start)
            with _reading(source):
                data = read.pread(wanted, start)
            if len(data) != wanted:
                raise CorruptCheckpoint(f"{source} ends too early")
            write.write_small(memoryview(data), start)
    for extent in named:
        if crc32c(write.pread(extent.size_bytes, extent.offset)) != extent.crc32c:
            raise CorruptCheckpoint(f"{source}: a table or a tree does not match its checksum")
    used += [(extent.offset, extent.size_bytes) for extent in named]
    if hash_gaps(write, used, shard.size_bytes) != shard.metadata_sha256:
        raise CorruptCheckpoint(f"{source}: the HDF5 metadata does not match its checksum")
