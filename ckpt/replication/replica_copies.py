"""Copies of another node's snapshots that keep only what this node's own snapshots of the same step do not have.

Where ranks hold the same tensors (plain data parallel training, HSDP), a lost rank's state lies in other nodes' memory,
but for what is its own: generators of random numbers, the position of its data loader, counters. A copy of these is
small. Tensors are the same where path, type, shape and the checksums of all blocks are, as for layout REPLICATED.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.format.manifest import RankTable, read_table
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.transport import MemoryPart
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c, map_shared

MOST_BYTES = 16 << 20
"""What one rank's copy may keep. More is no replica: that takes whole copies (``--partner-copies``)."""
LEAST_BYTES = 8 << 20
"""Smaller snapshots are committed about as soon as they are copied."""
STEPS = 2  # of each rank, as in its arenas
_ZEROS = memoryview(bytes(1 << 16))

Range = tuple[int, int]  # offset and size, in an arena


class CopyPart(NamedTuple):
    """Bytes of a copy, in the order of their offsets. ``holder``: the rank whose arena has them at ``at``.

    -1: the copy keeps them, at ``at`` of what it keeps.
    """

    offset: int
    size: int
    holder: int
    at: int


class Owned(NamedTuple):
    """A snapshot of a rank of this node."""

    held: arena.HeldSnapshot
    table: RankTable


class ReplicaCopy(NamedTuple):
    """One copy. ``page``: the first page of its arena. ``holders``: the snapshots of this node that it relies on."""

    page: bytes
    header: Header
    parts: Sequence[CopyPart]
    kept: bytes
    holders: Sequence[arena.HeldSnapshot]


class OpenedCopy:
    """A copy whose holders are pinned. ``page``: the first page of its arena."""

    def __init__(self, copy: ReplicaCopy) -> None:
        """Pin them. Raises CheckpointError where one of them is not there any more."""
        self.page = copy.page
        self._copy = copy
        self._files: dict[int, int] = {}
        for held in copy.holders:
            file = arena.lock_snapshot(held)
            if file is None:
                self.close()
                raise CheckpointError(f"this node has no snapshot of step {held.step} of rank {held.rank} any more")
            self._files[held.rank] = file

    def parts(self, writable: bool) -> list[MemoryPart]:
        """Return all bytes behind the first page, in order, where they are. ``writable``: map them so."""
        copy = self._copy
        memory = {held.rank: map_pinned(self._files[held.rank], held.size_bytes, writable) for held in copy.holders}
        memory[-1] = memoryview(copy.kept)
        at, found = PAGE, []
        for part in copy.parts:
            found += _gap(part.offset - at)
            found.append(MemoryPart(memory[part.holder], part.at, part.size))
            at = part.offset + part.size
        return found + _gap(copy.header.size_bytes - at)

    def close(self) -> None:
        """Let the holders be overwritten."""
        while self._files:
            os.close(self._files.popitem()[1])


def map_pinned(file: int, size: int, writable: bool) -> memoryview:
    """Map a file that ``lock_snapshot`` opened."""
    if not writable:
        return map_shared(file, size, False)
    own = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_shared(own, size, True)
    finally:
        os.close(own)


def _gap(size: int) -> list[MemoryPart]:
    """Return bytes that no reader looks at: between two tensors."""
    whole, rest = divmod(max(0, size), len(_ZEROS))
    return [MemoryPart(_ZEROS, 0, len(_ZEROS))] * whole + ([MemoryPart(_ZEROS, 0, rest)] if rest else [])


def owned(directory: Path, step: int, world_size: int) -> list[Owned]:
    """Return this node's own snapshots of a step, with their tables."""
    found = []
    for held in arena.scan(directory):
        header = arena.read_header(held.path) if (held.step, held.world_size) == (step, world_size) else None
        if header is not None:
            data = read_ranges(held, ((header.table_offset, header.table_size),))
            if data is not None:
                found.append(Owned(held, checked_table(header, data[PAGE:])))
    return found


def read_ranges(held: arena.HeldSnapshot, ranges: Sequence[Range]) -> bytes | None:
    """Return the first page of a snapshot, and some ranges of it; None where it was overwritten meanwhile.

    It is not pinned: a rank that saves is never in the way of this, nor this in its way. Raises CheckpointError.
    """
    if sum(size for _, size in ranges) > MOST_BYTES or any(
        offset < 0 or size < 0 or offset + size > held.size_bytes for offset, size in ranges
    ):
        raise CheckpointError("such ranges are not in the snapshot, or too large")
    try:
        with held.path.open("rb", buffering=0) as file:
            page = os.pread(file.fileno(), PAGE, 0)
            data = b"".join(os.pread(file.fileno(), size, offset) for offset, size in ranges)
            header = arena.header_of(file.fileno())
    except OSError:
        return None
    same = header is not None and (header.step, header.sequence) == (held.step, held.sequence)
    return page + data if same and arena.unpack(page) == header else None


def may_have_replicas(directory: Path, least_bytes: int = LEAST_BYTES) -> bool:
    """Return whether snapshots of this node are worth it, and say that other ranks may hold the same.

    They do by their layout, or as slabs. ``least_bytes``: of a snapshot that is worth it.
    """
    for held in sorted(arena.scan(directory), key=lambda held: held.size_bytes)[-1:]:  # one may be a reduced one
        if held.size_bytes < least_bytes:
            return False
        header = arena.read_header(held.path)
        if header is not None and header.layout == "replicated":
            return True
        mine = owned(directory, held.step, held.world_size)
        return any(record.slab is not None for one in mine for record in one.table.tensors)
    return False


def checked_table(header: Header, data: bytes) -> RankTable:
    """Return the table of a snapshot. Raises CheckpointError."""
    if crc32c(data) != header.table_crc32c:
        raise CheckpointError(f"the table of rank {header.rank}'s snapshot of step {header.step} is damaged")
    return read_table(data, header.size_bytes)


def compare(header: Header, table: RankTable, mine: Iterable[Owned]) -> tuple[list[CopyPart], list[Range]]:
    """Return a copy's parts, and the ranges of the other node's arena that it must keep. Pure."""
    holders: dict[object, tuple[int, int]] = {}
    for rank, its_table in ((one.held.rank, one.table) for one in mine):
        for record in its_table.tensors:
            if record.offset >= 0:
                holders.setdefault(record.content, (rank, record.offset))
    spans = [(record.offset, record.size_bytes, holders.get(record.content)) for record in table.tensors]
    spans += [(table.tree.offset, table.tree.size_bytes, None), (header.table_offset, header.table_size, None)]
    parts: list[CopyPart] = []
    ranges: list[Range] = []
    at = kept = 0
    for offset, size, holder in sorted(span for span in spans if span[0] >= 0 and span[1] > 0):
        if offset < max(at, PAGE):
            raise CheckpointError("the tensors of a snapshot overlap")
        at = offset + size
        if holder is not None:
            parts.append(CopyPart(offset, size, *holder))
        else:
            parts.append(CopyPart(offset, size, -1, kept))
            ranges.append((offset, size))
            kept += size
    return parts, ranges


class ReplicaCopies:
    """The copies that a node has. For use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, int], ReplicaCopy] = {}  # by rank and step

    def put(self, copy: ReplicaCopy) -> None:
        """Keep a copy, and of its rank no more than the newest ones beside it."""
        header = copy.header
        with self._lock:
            self._copies[header.rank, header.step] = copy
            steps = sorted(step for rank, step in self._copies if rank == header.rank and step != header.step)
            for step in steps[: 1 - STEPS or None]:
                del self._copies[header.rank, step]

    def get(self, rank: int, step: int, world_size: int) -> ReplicaCopy | None:
        """Return a copy, if there is one."""
        with self._lock:
            copy = self._copies.get((rank, step))
        return copy if copy is not None and copy.header.world_size == world_size else None

    def own_paths(self, rank: int) -> set[str]:
        """Return which tensors of a rank no snapshot of this node has, by its newest copy; empty without one."""
        with self._lock:
            copy = max((copy for (its, _), copy in self._copies.items() if its == rank), default=None,
                       key=lambda copy: copy.header.step)  # fmt: skip
        if copy is None:
            return set()
        kept = {part.offset: part for part in copy.parts if part.holder < 0}
        table = kept[copy.header.table_offset]
        tensors = checked_table(copy.header, copy.kept[table.at : table.at + table.size]).tensors
        return {record.path for record in tensors if record.size_bytes and record.offset in kept}

    def keep(self, copies: Collection[tuple[int, int]]) -> None:
        """Drop all but these, by rank and step."""
        with self._lock:
            self._copies = {key: copy for key, copy in self._copies.items() if key in copies}

    def keep_ranks(self, ranks: Collection[int]) -> None:
        """Drop those of other ranks."""
        with self._lock:
            self._copies = {key: copy for key, copy in self._copies.items() if key[0] in ranks}
