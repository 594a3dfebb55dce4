"""Reads a committed step whole, to see whether every byte is as it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import Segment
from resilio_hpc.ckpt.format.extents import Together, hash_gaps
from resilio_hpc.ckpt.format.manifest import Manifest, RankRecord, RankTable
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.store.view import why_wrong
from resilio_hpc.core.errors import CorruptCheckpoint

"""Called with the bytes read since the last call."""


@dataclass(frozen=True)
class Damage:
    """A damage in a file. ``rank`` and ``tensor`` where it belongs to one; ``offset``: of the first bad block."""

    file: str
    what: str
    rank: int = -1
    tensor: str = ""
    offset: int = -1


@dataclass(frozen=True)
class _Part:
    """A block of a tensor, or of anything else with a checksum."""

    offset: int
    size: int
    crc32c: int
    rank: int
    tensor: str


def verify_step(
    directory: Path,
    manifest: Manifest,
    progress: Progress = lambda size: None,
    room_bytes: int = bulk_io.ROOM_BYTES,
) -> list[Damage]:
    """Read every file of a step; return the damages, empty if all is well.

    ``directory``: of the checkpoints. Its buffers take ``room_bytes``, beside those of ``bulk_io``. The result is noted
    in the step, for the next pruning. Raises OSError for a device that fails.
    """
    damages = verify_files(checkpoint_index.step_directory(directory, manifest.step), manifest, progress, room_bytes)
    of_data = [f"{damage.file}: {damage.what}" for damage in damages if damage.file != checkpoint_index.VIEW]
    checkpoint_index.note_damage(directory, manifest.step, of_data[0] if of_data else "")
    return damages


def verify_files(
    path: Path, manifest: Manifest, progress: Progress = lambda size: None, room_bytes: int = bulk_io.ROOM_BYTES
) -> list[Damage]:
    """Do as ``verify_step``, for files in ``path``."""
    room = memoryview(bytearray(min(room_bytes, manifest.size_bytes)))
    damages: list[Damage] = []
    for shard in manifest.shards:
        try:
            with ShardReader(path, shard) as reader:
                damages += _verify_shard(reader, room, progress, room_bytes, store_of(path).together)
        except CorruptCheckpoint as error:
            damages.append(Damage(shard.file, str(error)))
    if why := why_wrong(path, manifest):
        what = f"{why}; a restore does not need it: make it anew with 'resilio ckpt show --h5', or remove it"
        damages.append(Damage(checkpoint_index.VIEW, what))
    return damages


def _verify_shard(
    reader: ShardReader, room: memoryview, progress: Progress, room_bytes: int, together: Together
) -> list[Damage]:
    shard, damages = reader.shard, list[Damage]()
    parts: list[_Part] = []
    used: list[tuple[int, int]] = []
    for rank in shard.ranks:
        try:
            table = reader.table(rank)
            reader.tree(rank, table)
        except CorruptCheckpoint as error:
            damages.append(Damage(shard.file, str(error), rank.rank))
            continue
        parts += _parts(rank, table)
        used += [(extent.offset, extent.size_bytes) for extent in (rank.table, table.tree)]
    whole = not damages  # otherwise it is not known what is metadata
    batches = _batches(sorted(parts, key=lambda part: part.offset), room_bytes)
    damages += _verify_parts(reader, batches, room, progress)
    used += [(part.offset, part.size) for part in parts]
    if not whole or not shard.metadata_sha256:
        return damages
    if hash_gaps(reader.file, used, shard.size_bytes, together) != shard.metadata_sha256:
        what = "the HDF5 metadata does not match its checksum; a restore does not need it, HDF5 programs do"
        damages.append(Damage(shard.file, what))
    return damages


def _parts(rank: RankRecord, table: RankTable) -> Iterator[_Part]:
    for record in table.tensors:
        if record.offset >= 0:
            for (start, size), checksum in zip(record.blocks(), record.checksums, strict=True):
                yield _Part(record.offset + start, size, checksum, rank.rank, record.path)


def _verify_parts(
    reader: ShardReader, batches: Iterable[list[_Part]], room: memoryview, progress: Progress
) -> Iterator[Damage]:
    """Verify as many parts at a time as the buffer holds. Of a tensor, the first bad block is reported."""
    told: set[tuple[int, str]] = set()
    for some in batches:
        at, segments = 0, []
        for part in some:
            segments.append(Segment(part.offset, room[at : at + part.size], part.crc32c))
            at += part.size
        for bad in reader.file.read(segments):
            part = some[bad]
            if (part.rank, part.tensor) not in told:
                told.add((part.rank, part.tensor))
                what = f"rank {part.rank}: tensor {part.tensor} does not match its checksum at byte {part.offset}"
                yield Damage(reader.shard.file, what, part.rank, part.tensor, part.offset)
        progress(at)


def _batches(parts: Sequence[_Part], room_bytes: int) -> Iterator[list[_Part]]:
    some: list[_Part] = []
    size = 0
    for part in parts:
        if some and size + part.size > room_bytes:
            yield some
            some, size = [], 0
        some.append(part)
        size += part.size
    if some:
        yield some
