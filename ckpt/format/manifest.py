"""The description of a checkpoint: the table of one rank's tensors, and the manifest of a step.

They are structs on disk, so everything that is read is checked (``check_table``, ``check_manifest``): a checkpoint may
come from a disk with errors, and its numbers are used as sizes, offsets and file names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from resilio_hpc.ckpt.state.tensors import Kind
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint

FORMAT = "resilio-checkpoint"
VERSION = 2
"""What is written; 1, which is read as well, had larger blocks."""
BLOCK_BYTES = 1 << 20  # each has a checksum: a reader of one byte reads all of the block
"""A tensor has one CRC32C for each so many of its bytes."""
_OLD_BLOCK_BYTES = 16 << 20

Layout = Literal["own", "replicated"]
REPLICATED: Literal["replicated"] = "replicated"
"""Layout of plain data parallel training: rank 0's tensors go to disk, and those of other ranks that differ."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Checksum = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class SlabRecord(msgspec.Struct, frozen=True, array_like=True):
    """Which part of a global tensor a tensor is: see ``slab.Slab``."""

    global_shape: tuple[Count, ...]
    start: tuple[Count, ...]
    replica: Count = 0


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its place in the state, its description, where its bytes are, and the CRC32C of each block.

    ``offset`` counts from the beginning of the file (arena or HDF5); -1: the bytes are elsewhere, with rank 0
    (replicated) or with the rank that holds replica 0 of the slab.
    """

    path: str
    kind: Kind
    dtype: str
    shape: tuple[Count, ...]
    offset: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    size_bytes: Count
    checksums: tuple[Checksum, ...]
    slab: SlabRecord | None = None

    @property
    def block_bytes(self) -> int:
        """Return the size of each block except the last, in bytes."""
        return BLOCK_BYTES if len(self.checksums) == _count(self.size_bytes, BLOCK_BYTES) else _OLD_BLOCK_BYTES

    @property
    def content(self) -> object:
        """Return what is equal for two tensors that are the same, wherever their bytes are."""
        return self.path, self.kind, self.dtype, self.shape, self.size_bytes, self.checksums

    def block(self, number: int) -> tuple[int, int]:
        """Return the (start, size) of one block."""
        start = number * self.block_bytes
        return start, min(self.block_bytes, self.size_bytes - start)

    def blocks(self) -> list[tuple[int, int]]:
        """Return the (start, size) of each block, in the order of ``checksums``."""
        return _cut(self.size_bytes, self.block_bytes)


class Extent(msgspec.Struct, frozen=True):
    """A range of bytes of a file, and its CRC32C."""

    offset: Count
    size_bytes: Count
    crc32c: Checksum


class RankTable(msgspec.Struct, frozen=True):
    """One rank's part: the tree of plain values (see ``tree``) and the tensors. ``group``: see ``state.parts_held``."""

    tree: Extent
    tensors: tuple[TensorRecord, ...]
    group: str | UnsetType = UNSET


class RankRecord(msgspec.Struct, frozen=True):
    """Where a rank's table lies in its shard file."""

    rank: Count
    table: Extent
    table_sha256: str


class Checks(msgspec.Struct, frozen=True):
    """What the commit needs of a shard file beyond the manifest's record.

    ``slabs``: a hash of which parts of which tensors its ranks hold; "": none. ``base`` and ``differs``: see
    ``replicas.Differences``.
    """

    slabs: str = ""
    base: str = ""
    differs: str = ""


class ShardRecord(msgspec.Struct, frozen=True):
    """One durable shard file: its record for the manifest, and ``checks``. The controller passes it on unread.

    ``metadata_sha256``: of all bytes that are neither a tensor nor a rank's tree or table (``extents.hash_gaps``). No
    restore reads them; HDF5 programs do. ``node``: whose own disk had the file as well; "": none.
    """

    node_rank: Count
    file: str
    size_bytes: Count
    layout: Layout
    ranks: tuple[RankRecord, ...]
    metadata_sha256: str = ""
    node: str = ""
    checks: Checks | UnsetType = UNSET


class Writer(msgspec.Struct, frozen=True):
    """A process that saves without a launcher. ``job``: a name that all processes of the run share.

    ``machine``: where its ``pid`` counts; ``begun``: its start time, in ticks since that machine's boot.
    """

    job: str
    host: str
    machine: str
    pid: Count
    begun: Count


class Manifest(msgspec.Struct, frozen=True):
    """A committed step.

    Its presence is the commit. ``order`` grows with every commit of a directory. ``writer``: the process that asked for
    it; unset under a launcher, whose epochs tell.
    """

    step: Count
    epoch: Count
    round: Count
    order: Count
    world_size: Count
    layout: Layout
    shards: tuple[ShardRecord, ...]
    writer: Writer | UnsetType = UNSET

    @property
    def size_bytes(self) -> int:
        """Return the size of all shard files."""
        return sum(shard.size_bytes for shard in self.shards)

    def shard_of(self, rank: int) -> tuple[ShardRecord, RankRecord]:
        """Return the file and the record of a rank. Raises KeyError."""
        for shard in self.shards:
            for record in shard.ranks:
                if record.rank == rank:
                    return shard, record
        raise KeyError(rank)


class _Sealed(msgspec.Struct):
    """The file's content: with any bit flipped, it is no valid manifest."""

    format: str
    version: int
    sha256: str
    manifest: msgspec.Raw


_table_decoder = msgspec.json.Decoder(RankTable)
_manifest_decoder = msgspec.json.Decoder(Manifest)
_sealed_decoder = msgspec.json.Decoder(_Sealed)
_encoder = msgspec.json.Encoder()
_SHARD_NAME = re.compile(r"node-(0|[1-9][0-9]{0,8})\.h5")


def blocks(size_bytes: int) -> list[tuple[int, int]]:
    """Return the (start, size) of each block of a tensor that is to be written."""
    return _cut(size_bytes, BLOCK_BYTES)


def _cut(size_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(block_bytes, size_bytes - start)) for start in range(0, size_bytes, block_bytes)]


def _count(size_bytes: int, block_bytes: int) -> int:
    return -(-size_bytes // block_bytes)


def sha256(data: bytes) -> str:
    """Return the hash of a table or manifest, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_table(data: bytes, file_size: int) -> RankTable:
    """Return a rank's table, every number in it checked against the size of its file. Raises CorruptCheckpoint."""
    try:
        table = _table_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"the table of tensors cannot be read: {error}") from error
    check_extent(table.tree, file_size, "the tree")
    for record in table.tensors:
        if record.offset >= 0:
            if record.offset + record.size_bytes > file_size:
                raise CorruptCheckpoint(f"tensor {record.path} lies beyond the end of its file")
            if len(record.checksums) != _count(record.size_bytes, record.block_bytes):
                raise CorruptCheckpoint(f"tensor {record.path} lacks checksums")
        if record.slab is not None:
            _check_slab(record, record.slab)
    return table


def _check_slab(record: TensorRecord, slab: SlabRecord) -> None:
    if not len(record.shape) == len(slab.global_shape) == len(slab.start) or any(
        first + length > whole for first, length, whole in zip(slab.start, record.shape, slab.global_shape, strict=True)
    ):
        raise CorruptCheckpoint(f"tensor {record.path} lies outside of the tensor that it is a part of")


def check_extent(extent: Extent, file_size: int, what: str) -> None:
    """Raise CorruptCheckpoint when an extent does not lie inside its file."""
    if extent.offset + extent.size_bytes > file_size:
        raise CorruptCheckpoint(f"{what} lies beyond the end of its file")


def seal(manifest: bytes) -> bytes:
    """Return the content of a manifest's file."""
    return _encoder.encode(_Sealed(FORMAT, VERSION, sha256(manifest), msgspec.Raw(manifest)))


def write_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file that ``read_manifest`` reads."""
    return seal(_encoder.encode(manifest))


def read_manifest(data: bytes, step: int) -> Manifest:
    """Return the manifest of ``step``, checked. Raises CorruptCheckpoint, or CheckpointError for a newer version."""
    try:
        sealed = _sealed_decoder.decode(data)
        if sealed.format != FORMAT or sealed.version < 1:
            raise CorruptCheckpoint(f"manifest of step {step}: format {sealed.format!r}, version {sealed.version}")
        if sealed.version > VERSION:
            raise CheckpointError(
                f"step {step} was written in version {sealed.version} of the format, this resilio_hpc reads versions "
                f"up to {VERSION}; upgrade it"
            )
        if sha256(bytes(sealed.manifest)) != sealed.sha256:
            raise CorruptCheckpoint(f"manifest of step {step} does not match its checksum")
        manifest = _manifest_decoder.decode(sealed.manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"manifest of step {step} cannot be read: {error}") from error
    check_manifest(manifest, step)
    return manifest


def check_manifest(manifest: Manifest, step: int) -> None:
    """Raise CorruptCheckpoint when a manifest contradicts itself or names files outside its directory."""
    why = f"it is of step {manifest.step}" if manifest.step != step else ""
    why = why or why_incomplete(manifest.shards, manifest.world_size)
    if why:
        raise CorruptCheckpoint(f"manifest of step {step} is wrong: {why}")


def is_shard_name(name: str) -> bool:
    """Return whether a shard file may have this name."""
    return _SHARD_NAME.fullmatch(name) is not None


def why_incomplete(shards: Sequence[ShardRecord], world_size: int) -> str:
    """Return why these shards are not one whole checkpoint of ``world_size`` ranks; "" when they are."""
    names = [shard.file for shard in shards]
    for shard in shards:
        if not is_shard_name(shard.file):
            return f"{shard.file!r} is not the name of a shard file"
        for record in shard.ranks:
            if record.table.offset + record.table.size_bytes > shard.size_bytes:
                return f"the table of rank {record.rank} lies beyond the end of {shard.file}"
    if len(set(names)) != len(names):
        return "two shards have the same file"
    ranks = sorted(record.rank for shard in shards for record in shard.ranks)
    if world_size < 1 or len(ranks) != world_size or ranks != list(range(world_size)):
        return f"it holds ranks {ranks[:8]}{'…' if len(ranks) > 8 else ''} of a world of {world_size}"
    return ""
