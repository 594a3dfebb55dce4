"""Writing one node's shard file from arenas: the data goes to the offsets that ``shard_metadata`` gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from resilio_hpc.ckpt.format.bulk_io import Block, PageRun
from resilio_hpc.ckpt.format.files import NewFile
from resilio_hpc.ckpt.format.manifest import Checks, ShardRecord
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.shard_metadata import FilePlace, HdfImage, RankPart
from resilio_hpc.ckpt.format.whole_snapshot import WholeSnapshot
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import CorruptCheckpoint


def write_shard(
    arenas: Sequence[WholeSnapshot],
    directory: Path,
    node_rank: int,
    mode: int = 0o666,
    bytes_per_s: float = 0.0,
    verify: bool = True,
    recycled: Path | None = None,
    own: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> ShardRecord:
    """Write ``directory/node-<node_rank>.h5`` from whole snapshots, durable on return.

    ``recycled``: a directory of files that may be written over: to have another one's room takes less than half the
    time of giving that back and asking for as much. ``own``: of each rank, see ``RankPart``.
    ``bytes_per_s``: see ``bulk_io.write``. ``verify``: each block once more, which reads all of the memory; without it
    the processor touches nothing of what a disk takes past the page cache.

    Raises CorruptCheckpoint (a bad arena; nothing remains) or OSError (disk full, I/O error; nothing remains).
    """
    name = f"node-{node_rank}.h5"
    former = None if recycled is None else recycled / name
    store = store_of(directory)
    store.check_space(directory, sum(arena.header.size_bytes for arena in arenas), former)
    parts = [
        RankPart(
            arena.step, arena.header.rank, arena.header.layout, arena.tree, arena.tensors,
            own.get(arena.header.rank, frozenset()),
        )
        for arena in arenas
    ]  # fmt: skip
    with HdfImage(parts) as image, store.new_file(directory / name, mode, former) as file:
        metadata = image.write(file)
        for arena, places in zip(arenas, image.places, strict=True):
            _write_rank(file, arena, places, bytes_per_s, verify)
    layout, ranks, checks = arenas[0].header.layout, tuple(image.ranks), Checks(image.slabs)
    return ShardRecord(node_rank, name, image.size_bytes, layout, ranks, metadata, checks=checks)


def _write_rank(
    file: NewFile, arena: WholeSnapshot, places: Sequence[FilePlace], bytes_per_s: float, verify: bool
) -> None:
    """Write whole pages that begin on a page of both past the page cache, the rest through it."""
    pieces: list[PageRun] = []
    memory = arena.view
    taken = {place.start for place in places if place.data is None and place.start < len(memory)}
    records = [record for record in arena.tensors if record.offset in taken]
    for place in places:
        in_view = place.data is None and place.start + place.size <= len(memory)
        aligned = in_view and place.offset % PAGE == place.start % PAGE == 0
        whole = place.size - place.size % PAGE if aligned else 0
        if whole:
            pieces.append(PageRun(place.start, place.offset, whole))
        rest = arena.slice(place.start, place.size) if place.data is None else memoryview(place.data)
        file.write_small(rest[whole:], place.offset + whole)
    named = [
        (Block(record.offset + start, checksum, size), record.path)
        for record in sorted(records, key=lambda record: record.offset)
        for (start, size), checksum in zip(record.blocks(), record.checksums, strict=True)
        if verify
    ]
    bad = file.write(memory, sorted(pieces), [block for block, _ in named], bytes_per_s)
    if bad is not None:
        raise CorruptCheckpoint(f"tensor {named[bad][1]} does not match its checksum in the arena")
