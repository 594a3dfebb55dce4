"""Reads a box of a saved tensor into a box of another: only the blocks that it touches, each verified.

Whole blocks whose bytes lie together in the target are read straight into it. Of all others the native reader copies
the runs that belong to the box, in the pass that computes the checksum (``native/scatter.h``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from math import prod
from typing import NamedTuple

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment, Strides
from resilio_hpc.ckpt.format.files import HasFile
from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.format.source import mismatch, populate_large
from resilio_hpc.ckpt.restore.shared_blocks import SHARE_BYTES as SHARED_BYTES
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks, read_segments, wanted_soon
from resilio_hpc.ckpt.state.slab import Box, Shape
from resilio_hpc.ckpt.tiers.peer_disks import PeerFile

_SHARE_BYTES = 64 << 20
_LONG = 4  # blocks: longer parts are read with the blocks at their edges, which a neighbour reads too


class Part(NamedTuple):
    """``box`` of a saved tensor; it goes to the equally large box that begins at ``start`` of ``target``.

    ``target``: contiguous memory of a tensor of ``shape`` with the same dtype.
    """

    reader: HasFile
    record: TensorRecord
    box: Box
    target: memoryview
    shape: Shape
    start: Shape


class _BlockRead(NamedTuple):
    """A block that a part touches.

    ``turn``: other than 0 where another part reads the same tensor too. ``file``: the same numbers in all processes, so
    that all go through the files in the same order.
    """

    direct: bool
    turn: int
    file: tuple[int, int]
    reader: HasFile
    offset: int
    start: int
    segment: Segment | BoxSegment
    part: Part


def read_parts(
    step: int,
    parts: Sequence[Part],
    direct: bool | None,
    pool: ThreadPoolExecutor,
    local_rank: int = 0,
    shared: SharedBlocks | None = None,
    peer: PeerFile | None = None,
    share_bytes: int = _SHARE_BYTES,
) -> None:
    """Read all parts, in the order of the files, a few neighbours at a time.

    ``direct``: see ``bulk_io.read``; None: directly what only this process probably reads. ``shared``: how to read the
    rest; None: through the page cache. ``peer``: the copy of all parts, if it is read in place of the file.
    ``share_bytes``: what a thread reads with one call. ``local_rank``: of this process in its node; each begins with
    other blocks of what is not shared, so that processes which read the same do not get in each other's way. Raises
    CorruptCheckpoint for bytes that do not match their checksum, OSError for a device that fails.
    """
    seen: Counter[tuple[HasFile, int]] = Counter()
    reads: list[_BlockRead] = []
    for part in parts:
        if part.box.size:
            reads += _reads(part, seen[part.reader, part.record.offset], direct)
            seen[part.reader, part.record.offset] += 1
    reads.sort(key=lambda read: (*read[:3], read.offset))
    fresh = {id(part.target): part.target for part in parts}
    lock = threading.Lock()

    def read(share: list[_BlockRead], soon: Sequence[Segment | BoxSegment] = ()) -> None:
        for one in share:
            with lock:
                target = fresh.pop(id(one.part.target), None)
            if target is not None:
                populate_large(target)
        _read_share(step, share, shared, peer, soon)

    together = [read for read in reads if shared is not None and not read.direct]
    common = list(_shares(together, SHARED_BYTES))
    shares = list(_shares(reads[len(together) :], share_bytes))
    first = int(_begin(local_rank) * len(shares))
    pending = []
    if shared is not None:
        threads = (peer or shared).pool
        pending = [threads.submit(read, share, wanted_soon(common, number)) for number, share in enumerate(common)]
    if peer is not None:
        pool = peer.pool
    pending += [pool.submit(read, share) for share in shares[first:] + shares[:first]]
    wait(pending)
    for future in pending:
        future.result()


def _begin(local_rank: int) -> float:
    """Return 0, 1/2, 1/4, 3/4, 1/8 …: where a process begins.

    Neighbours, which most often read the same, begin far apart, and so do all together.
    """
    digits = f"{local_rank:b}"
    return float(int(digits[::-1], 2) / 2 ** len(digits))


def read_part(step: int, part: Part) -> None:
    """Read one part directly, in this thread, like ``read_parts``."""
    for share in _shares(list(_reads(part, 0, True)) if part.box.size else [], _SHARE_BYTES):
        _read_share(step, share)


def _read_share(
    step: int,
    share: Sequence[_BlockRead],
    shared: SharedBlocks | None = None,
    peer: PeerFile | None = None,
    soon: Sequence[Segment | BoxSegment] = (),
) -> None:
    file, direct, segments = share[0].reader.file, share[0].direct, [one.segment for one in share]
    if not direct and shared is None and peer is None and not file.reads_far_ahead:
        for one in share:
            file.read_ahead(one.offset, bulk_io.size_of(one.segment))
    for bad in read_segments(file, segments, direct, None if direct else shared, peer, soon):
        raise mismatch(step, share[bad].part.record, share[bad].start)


def _shares(reads: Sequence[_BlockRead], size: int) -> Iterator[list[_BlockRead]]:
    """Yield shares for threads: neighbours in one file, up to ``size`` bytes."""
    share: list[_BlockRead] = []
    for read in reads:
        if share and (read[:4] != share[0][:4] or read.offset - share[0].offset >= size):
            yield share
            share = []
        share.append(read)
    if share:
        yield share


def _reads(part: Part, turn: int, direct: bool | None) -> Iterator[_BlockRead]:
    strides = strides_of(part)
    first, to, run, _ = strides
    is_one_run = run == part.box.size * _item(part.record)
    extent = _extent(strides)
    is_apart = extent == part.box.size * _item(part.record) < _whole_bytes(part.record)
    is_long = extent >= _LONG * part.record.block_bytes
    file = part.reader.file.identity
    for number in _touched(strides, part.record.block_bytes):
        start, size = part.record.block(number)
        is_inside = first <= start and start + size <= first + extent
        offset, checksum = part.record.offset + start, part.record.checksums[number]
        segment: Segment | BoxSegment
        if is_one_run and is_inside:
            segment = Segment(offset, part.target[to + start - first : to + start - first + size], checksum)
        else:
            segment = BoxSegment(offset, part.target, checksum, size, start, strides)
        # other processes of this node read what is left of a tensor: columns, and blocks at the edges
        alone = is_apart and (is_inside or is_long)
        yield _BlockRead(alone if direct is None else direct, turn, file, part.reader, offset, start, segment, part)


def strides_of(part: Part) -> Strides:
    """Return the runs of bytes of the box in the saved tensor and in the target: as few and as long as possible."""
    saved, item = part.record.shape or (1,), _item(part.record)
    begin, counts = (part.box.start, part.box.shape) if part.record.shape else ((0,), (1,))
    shape, start = (part.shape, part.start) if part.record.shape else ((1,), (0,))
    first = to = 0
    run = source = target = item
    levels: list[tuple[int, int, int]] = []
    for number in reversed(range(len(saved))):
        first += begin[number] * source
        to += start[number] * target
        count = counts[number]
        inner = levels[0] if levels else (run, 1, 1)
        # it goes on where the level inside of it ends
        if (inner[0] * inner[1], inner[0] * inner[2]) == (source, target):
            if levels:
                levels[0] = (inner[0] * count, *inner[1:])
            else:
                run *= count
        elif count > 1:
            levels.insert(0, (count, source, target))
        source *= saved[number]
        target *= shape[number]
    return first, to, run, tuple(levels) or ((1, run, run),)


def _extent(strides: Strides) -> int:
    """Return the bytes from the first one of the box to its last one, in the file."""
    return strides[2] + sum((count - 1) * source for count, source, _ in strides[3])


def _touched(strides: Strides, size: int) -> Iterator[int]:
    """Yield the numbers of the blocks of ``size`` in which the box has a byte, in order."""
    first, _, run, levels = strides
    far = [level for level in levels if level[1] > size]  # no whole block fits between the runs of others
    length = _extent((0, 0, run, levels[len(far) :]))
    last = -1
    for at in product(*(range(0, count * step, step) for count, step, _ in far)):
        begin = first + sum(at)
        for number in range(max(last + 1, begin // size), (begin + length - 1) // size + 1):
            yield number
            last = number


def _item(record: TensorRecord) -> int:
    return record.size_bytes // prod(record.shape)


def _whole_bytes(record: TensorRecord) -> int:
    """Return the bytes of the tensor that it is a part of."""
    return _item(record) * prod(record.slab.global_shape if record.slab is not None else record.shape)
