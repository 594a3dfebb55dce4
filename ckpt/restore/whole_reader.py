"""Reads saved tensors whole: in the order of the files, neighbours with one call, each block verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from typing import NamedTuple

from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment
from resilio_hpc.ckpt.format.files import HasFile
from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.format.source import Wanted, checksum_at, mismatch, populate_large
from resilio_hpc.ckpt.restore.shared_blocks import SHARE_BYTES as SHARED_BYTES
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks, read_segments, wanted_soon
from resilio_hpc.ckpt.tiers.peer_disks import PeerFile
from resilio_hpc.native import copy_blocks, populate

SHARE_BYTES = 256 << 20
_COPY_BYTES = 32 << 20


def copy_whole(
    step: int, memory: memoryview, wanted: Sequence[Wanted], pool: ThreadPoolExecutor, fresh: bool = False
) -> None:
    """Do as ``read_whole``, from memory that has each tensor where it lies in the file. ``fresh``: mapped just now."""

    def copy(share: list[_BlockCopy]) -> None:
        for record, target, parts in share:
            if fresh:
                populate(memory[record.offset + parts[0][0] : record.offset + sum(parts[-1])])
            populate_large(target[parts[0][0] : sum(parts[-1])])
            crcs = copy_blocks(target, [(start, memory, record.offset + start, size) for start, size in parts])
            for (start, _), crc in zip(parts, crcs, strict=True):
                if crc != checksum_at(record, start):
                    raise mismatch(step, record, start)

    pending = [pool.submit(copy, share) for share in _copy_shares(wanted)]
    wait(pending)
    for future in pending:
        future.result()


class _BlockCopy(NamedTuple):
    """Consecutive blocks of a tensor, as (start, size), and the tensor's memory."""

    record: TensorRecord
    target: memoryview
    parts: list[tuple[int, int]]


def _copy_shares(wanted: Sequence[Wanted]) -> Iterator[list[_BlockCopy]]:
    """Yield shares for threads."""
    share: list[_BlockCopy] = []
    room = _COPY_BYTES
    for record, target in wanted:
        parts: list[tuple[int, int]] = []
        for start, size in record.blocks():
            parts.append((start, size))
            room -= size
            if room <= 0:
                yield [*share, _BlockCopy(record, target, parts)]
                share, parts, room = [], [], _COPY_BYTES
        if parts:
            share.append(_BlockCopy(record, target, parts))
    if share:
        yield share


class _BlockRead(NamedTuple):
    """A block of a tensor in a file, and where it goes in the tensor's memory."""

    reader: HasFile
    offset: int
    start: int
    size: int
    record: TensorRecord
    target: memoryview

    @property
    def segment(self) -> Segment:
        room = self.target[self.start : self.start + self.size]
        return Segment(self.offset, room, checksum_at(self.record, self.start))


def read_whole(
    step: int,
    wanted: Sequence[tuple[HasFile, TensorRecord, memoryview]],
    direct: bool,
    pool: ThreadPoolExecutor,
    shared: SharedBlocks | None = None,
    peer: PeerFile | None = None,
) -> None:
    """Fill memory of the size of each tensor, which lies in the file of its reader; threads share the work.

    ``shared``: how to read what is not read directly; None: through the page cache. ``peer``: the copy to read in place
    of the file. Raises CorruptCheckpoint for bytes that do not match their checksum, OSError for a device that fails.
    """
    if direct:
        shared = None
    parts = [
        _BlockRead(reader, record.offset + start, start, size, record, target)
        for reader, record, target in wanted
        for start, size in record.blocks()
    ]

    def read(share: list[_BlockRead], soon: Sequence[Segment | BoxSegment]) -> None:
        for _, found in groupby(share, key=lambda part: id(part.target)):
            parts = list(found)
            populate_large(parts[0].target[parts[0].start : parts[-1].start + parts[-1].size])
        segments = [part.segment for part in share]
        for bad in read_segments(share[0].reader.file, segments, direct, shared, peer, soon):
            raise mismatch(step, share[bad].record, share[bad].start)

    size = SHARED_BYTES if shared else peer.limits.share_bytes if peer else SHARE_BYTES
    shares = list(_shares(sorted(parts, key=lambda part: (part.reader.file.identity, part.offset)), size))
    together = peer.pool if peer else shared.pool if shared else pool
    soon = [wanted_soon(shares, number) if shared else [] for number in range(len(shares))]
    pending = [together.submit(read, *each) for each in zip(shares, soon, strict=True)]
    wait(pending)
    for future in pending:
        future.result()


def _shares(parts: Sequence[_BlockRead], size: int) -> Iterator[list[_BlockRead]]:
    """Yield shares for threads: neighbours in one file, up to ``size`` bytes."""
    share: list[_BlockRead] = []
    for part in parts:
        if share and (part.reader is not share[0].reader or part.offset - share[0].offset >= size):
            yield share
            share = []
        share.append(part)
    if share:
        yield share
