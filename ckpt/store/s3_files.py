"""Files of an object store: reads of ranges, and writes as uploads in parts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import Block, BoxSegment, PageRun, Segment
from resilio_hpc.ckpt.store.s3_bucket import Object, S3Bucket
from resilio_hpc.ckpt.store.s3_client import THREADS
from resilio_hpc.native import crc32c

PART_BYTES = 16 << 20
"""Of an upload. S3 takes 10,000 parts, so those of a large file are larger."""
_MOST_PARTS = 9_000
_READY = 2  # parts that wait for a thread, so that none waits for a part
_MIB = 1 << 20
_RANGE_BYTES = 16 << 20  # neighbours are read by one request, up to so much
_GAP_BYTES = 256 << 10  # a request takes longer than so many bytes more
_SIGN_OF_LIFE_S = 5.0

_Piece = tuple[int, bytes | memoryview]
"""Where it is in a part, and its bytes."""
Result = TypeVar("Result")
Given = TypeVar("Given")


def in_parallel(act: Callable[[Given], Result], items: Iterable[Given]) -> list[Result]:
    """Return the results for all items.

    After an error no other item is begun, and those that were begun come to their end. Then the error of the first of
    them in order is raised.
    """
    given, results = list(items), list[Future[Result]]()
    if len(given) < 2:
        return [act(one) for one in given]
    pool = ThreadPoolExecutor(THREADS, "resilio-s3")
    try:
        for one in given:
            try:
                results.append(pool.submit(act, one))
            except RuntimeError:  # no thread can be started: this process ends
                break
        wait(results, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    found = [result.result() for result in results if not result.cancelled()]
    return found + [act(one) for one in given[len(results) :]]


class S3File:
    """An object that is open for reading (``ReadFile``)."""

    reads_far_ahead = True

    def __init__(self, bucket: S3Bucket, key: str, found: Object) -> None:
        """Open an object that was found."""
        self._bucket, self._key = bucket, key
        self.size_bytes = found.size_bytes
        digest = hashlib.sha256(f"{bucket.name}/{key} {found.tag}".encode()).digest()
        self.identity = int.from_bytes(digest[:8], "big") >> 1, int.from_bytes(digest[8:16], "big") >> 1

    def pread(self, size: int, offset: int) -> bytes:
        """See ReadFile."""
        if size <= 0 or offset >= self.size_bytes:
            return b""
        return self._bucket.get(self._key, offset, size)[0]

    def read(self, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
        """See ReadFile. Only the ranges that hold segments are asked for."""
        bulk_io.check_apart(segments)
        bad = in_parallel(lambda some: self._read_range(segments, some), _ranges(segments))
        return sorted(index for some in bad for index in some)

    def _read_range(self, segments: Sequence[Segment | BoxSegment], some: range) -> list[int]:
        """Read neighbours; a file in memory is what ``bulk_io`` takes them from."""
        begin = segments[some[0]].offset
        size = segments[some[-1]].offset + bulk_io.size_of(segments[some[-1]]) - begin
        data = self.pread(size, begin)
        if len(data) != size:
            raise OSError(errno.ENODATA, "the file ends too early", f"s3://{self._bucket.name}/{self._key}")
        fd = os.memfd_create("resilio-s3", os.MFD_CLOEXEC)
        try:
            bulk_io.write_cached(fd, memoryview(data), 0)
            del data
            moved = [segments[index]._replace(offset=segments[index].offset - begin) for index in some]
            return [some[at] for at in bulk_io.read(fd, moved, direct=False)]
        finally:
            os.close(fd)

    def read_pages(self, memory: memoryview, offset: int) -> int:
        """See ReadFile."""
        data = self.pread(len(memory), offset)
        memory[: len(data)] = data
        return len(data)

    def read_ahead(self, offset: int, size: int) -> None:
        """See ReadFile: there is no cache."""

    def close(self) -> None:
        """See ReadFile."""


def _ranges(segments: Sequence[Segment | BoxSegment]) -> Iterator[range]:
    first = 0
    for index, (one, other) in enumerate(pairwise(segments), 1):
        end = one.offset + bulk_io.size_of(one)
        size = other.offset + bulk_io.size_of(other) - segments[first].offset
        if other.offset - end > _GAP_BYTES or size > _RANGE_BYTES:
            yield range(first, index)
            first = index
    if segments:
        yield range(first, len(segments))


class S3NewFile:
    """An object that is being written (``NewFile``), in parts of one size, several at a time.

    Small writes come in any order, and wait for the parts that they belong to; only they can be read. Large writes lie
    over them, and go from the beginning of the file to its end: where one begins, the parts before it are complete, and
    are on their way. ``sign`` is called now and then with the bytes sent.
    """

    is_recycled = False

    def __init__(self, bucket: S3Bucket, key: str, sign: Callable[[int], None] = lambda sent: None) -> None:
        """Write nothing yet."""
        self._bucket, self._key, self._sign = bucket, key, sign
        self._size, self._part_bytes = 0, PART_BYTES
        self._small: dict[int, mmap.mmap] = {}  # of each part; pages that nothing is written to cost none
        self._large: dict[int, list[_Piece]] = {}
        self._sent = 0  # parts
        self._joining: list[Future[None]] = []  # parts on their way that still read the memory of a large write
        self._upload = ""
        self._tags: list[Future[str]] = []
        self._under_way: set[Future[str]] = set()
        self._pool = ThreadPoolExecutor(THREADS, "resilio-s3")
        self._began, self._signed = time.monotonic(), time.monotonic()

    def allocate(self, size_bytes: int) -> None:
        """See NewFile."""
        self._size = max(self._size, size_bytes)
        if not self._sent and not self._small and not self._large:
            self._part_bytes = max(PART_BYTES, -(-size_bytes // _MOST_PARTS // _MIB) * _MIB)

    def pread(self, size: int, offset: int) -> bytes:
        """See NewFile; raises OSError for what is on its way already."""
        found = bytearray()
        for part, at, length in self._cut(offset, max(0, min(size, self._size - offset))):
            self._check_is_here(part)
            small = self._small.get(part)
            found += bytes(length) if small is None else small[at : at + length]
        return bytes(found)

    def write_small(self, data: memoryview, offset: int) -> None:
        """See NewFile."""
        if len(data) > _MIB:  # a copy in order
            self._send_before(offset)
        done = 0
        for part, at, size in self._cut(offset, len(data)):
            self._take(part, offset + len(data))
            if part not in self._small:
                self._small[part] = mmap.mmap(-1, self._part_bytes)
            self._small[part][at : at + size] = data[done : done + size]
            done += size

    def write(
        self, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
    ) -> int | None:
        """See NewFile. Blocks are verified while parts are on their way: a bad one ends the upload."""
        verified = 0

        def verify(end: int) -> bool:
            nonlocal verified
            while verified < len(blocks) and blocks[verified].start < end:
                block = blocks[verified]
                if crc32c(memory[block.start : block.start + block.size]) != block.crc32c:
                    return False
                verified += 1
            return True

        for piece in sorted(pieces, key=lambda piece: piece.offset):
            for part, at, size in self._cut(piece.offset, piece.size):
                begin = part * self._part_bytes + at
                self._send_before(begin, bytes_per_s)
                start = piece.start + begin - piece.offset
                if not verify(start + size):
                    return verified
                self._take(part, begin + size)
                self._large.setdefault(part, []).append((at, memory[start : start + size]))
        if not verify(len(memory)):
            return verified
        for large in self._large.values():  # the memory is the caller's again; after an error, once it gives up
            large[:] = [(at, bytes(data)) for at, data in large]
        wait(self._joining)
        self._joining.clear()
        return None

    def finish(self) -> None:
        """Make the object appear, whole. Raises OSError."""
        if not self._sent and self._size <= self._part_bytes:
            self._bucket.put(self._key, _joined(self._size, self._small.get(0), self._large.get(0, [])))
        else:
            self._send_before(-(-self._size // self._part_bytes) * self._part_bytes)
            tags = [tag.result() for tag in self._tags]
            self._bucket.complete_upload(self._key, self._upload, tags, self._size)
        self._pool.shutdown()

    def give_up(self) -> None:
        """Let nothing of it remain. Raises nothing."""
        self._pool.shutdown(cancel_futures=True)
        self._large.clear()
        if self._upload:
            with contextlib.suppress(OSError):
                self._bucket.abort_upload(self._key, self._upload)

    def _cut(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (part, where in it, size) of a range."""
        end = offset + size
        while offset < end:
            part, at = divmod(offset, self._part_bytes)
            length = min(end - offset, self._part_bytes - at)
            yield part, at, length
            offset += length

    def _take(self, part: int, end: int) -> None:
        self._check_is_here(part)
        self._size = max(self._size, end)

    def _check_is_here(self, part: int) -> None:
        if part < self._sent:
            raise OSError(errno.ESPIPE, f"part {part + 1} is on its way already", self._key)

    def _send_before(self, offset: int, bytes_per_s: float = 0.0) -> None:
        """Send the parts that end at ``offset`` or before."""
        while (self._sent + 1) * self._part_bytes <= offset:
            if not self._upload:
                self._upload = self._bucket.begin_upload(self._key)
            if len(self._under_way) >= THREADS + _READY:  # more would fill the memory
                done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
                for tag in done:
                    tag.result()
            part, joining = self._sent, Future[None]()
            size = min(self._part_bytes, self._size - part * self._part_bytes)
            content = size, self._small.pop(part, None), self._large.pop(part, [])
            self._joining.append(joining)
            self._tags.append(self._pool.submit(self._upload_part, part, joining, *content))
            self._under_way.add(self._tags[-1])
            self._sent += 1
            sent = self._sent * self._part_bytes
            if time.monotonic() > self._signed + _SIGN_OF_LIFE_S:
                self._signed = time.monotonic()
                self._sign(sent)
            if bytes_per_s > 0.0:
                time.sleep(max(0.0, self._began + sent / bytes_per_s - time.monotonic()))

    def _upload_part(
        self, part: int, joining: Future[None], size: int, small: mmap.mmap | None, large: list[_Piece]
    ) -> str:
        try:
            data = _joined(size, small, large)
        finally:
            large.clear()
            joining.set_result(None)
        return self._bucket.upload_part(self._key, self._upload, part + 1, data)


def _joined(size: int, small: mmap.mmap | None, large: Iterable[_Piece]) -> bytearray:
    """Return the bytes of a part: large writes, and between them what was written small, else zeros."""
    found, end = list[bytes | memoryview](), 0
    for at, data in [*sorted(large, key=lambda piece: piece[0]), (size, b"")]:
        found += [bytes(at - end) if small is None else small[end:at], data]
        end = at + len(data)
    return bytearray().join(found)
