"""Blocks that several processes of a node read at about the same time.

Each is read once, past the page cache, into a ring in shared memory, from which all of them copy. A reader of a block
verifies it. No process depends on another: no lock is held while a disk works; a block whose reader does not finish is
read again by the process that needs it; a copy is valid if the slot has still the same content after it. So a killed or
stopped process delays no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment, size_of
from resilio_hpc.ckpt.format.files import HasFile, ReadFile
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES, Manifest
from resilio_hpc.ckpt.restore.block_ring import Ring, is_unused, remove_if_unused
from resilio_hpc.ckpt.restore.block_table import LIMITS, RingLimits
from resilio_hpc.ckpt.tiers.peer_disks import PeerFile

THREADS = 2
"""Of each process: while one copies, the other one keeps the disk busy."""
SHARE_BYTES = 8 << 20
"""What a thread goes for at a time: all of them are close to each other, and the ring is not run over."""
_SHARES_AHEAD = 2  # with those of the threads, half the ring: a process that is behind finds them there for as long
_SMALL_BYTES = 64 << 10  # smaller ones go through the page cache: the ring costs more than it saves
_SHARED_MEMORY = Path("/dev/shm")


class SharedBlocks:
    """The shared blocks of one step. ``read`` is like ``bulk_io.read``, and may be called by several threads."""

    def __init__(
        self,
        name: str,
        directory: Path = _SHARED_MEMORY,
        limits: RingLimits = LIMITS,
        small_bytes: int = _SMALL_BYTES,
    ) -> None:
        """Prepare; ``name``: the same in all processes that read the same step.

        Nothing is made before the first ``read``.

        ``small_bytes``: smaller segments go through the page cache.
        """
        self._limits, self._small_bytes = limits, small_bytes
        self._path = directory / f"{_prefix()}{name}"
        self._lock = threading.Lock()
        self._ring: Ring | None = None
        self._is_open = False
        self.pool = ThreadPoolExecutor(THREADS, "resilio-shared")

    def read(
        self,
        file: ReadFile,
        segments: Sequence[Segment | BoxSegment],
        peer: PeerFile | None = None,
        soon: Sequence[Segment | BoxSegment] = (),
    ) -> list[int]:
        """Fill every target; return the indices of those that do not match their checksum.

        ``peer``: the first reader reads there. ``soon``: see ``wanted_soon``. Raises CorruptCheckpoint for segments
        that overlap, OSError.
        """
        bulk_io.check_apart(segments)
        ring = self._ring_now()
        if ring is None:
            return read_segments(file, segments, False, None, peer)
        large: list[int] = []
        rest: list[int] = []
        for index, segment in enumerate(segments):
            (large if self._is_large(segment) else rest).append(index)
        ahead = [segment for segment in soon if self._is_large(segment)]
        fetch = peer.fill if peer else None
        bad = [large[at] for at in ring.read(file, [segments[index] for index in large], fetch, ahead)]
        bad = [bad[at] for at in _read_some(file, segments, bad, True, peer)]
        return bad + [rest[at] for at in _read_some(file, segments, rest, False, peer)]

    def _is_large(self, segment: Segment | BoxSegment) -> bool:
        return self._small_bytes <= size_of(segment) <= BLOCK_BYTES  # larger ones are of an older version

    def _ring_now(self) -> Ring | None:
        with self._lock:
            if not self._is_open:
                self._is_open = True
                sweep(self._path.parent)
                with contextlib.suppress(OSError):
                    self._ring = Ring(self._path, self._limits)
            return self._ring

    def close(self) -> None:
        """Leave the ring; the last process removes it."""
        self.pool.shutdown()
        with self._lock:
            if self._ring is not None:
                self._ring.close()
            self._ring, self._is_open = None, True


class SegmentRead(Protocol):
    """A segment of a file."""

    @property
    def reader(self) -> HasFile: ...
    @property
    def segment(self) -> Segment | BoxSegment: ...


def wanted_soon(shares: Sequence[Sequence[SegmentRead]], number: int) -> list[Segment | BoxSegment]:
    """Return what the thread with the share of that number may read ahead while it would wait for others.

    These are the next shares of the same file, behind those of this process's other threads.
    """
    first = number + THREADS
    soon = [read for share in shares[first : first + _SHARES_AHEAD] for read in share]
    return [read.segment for read in soon if read.reader is shares[number][0].reader]


def name_of(directory: Path, manifest: Manifest) -> str:
    """Return a name for ``SharedBlocks``, of a committed step in this directory."""
    text = f"{directory.absolute()}\0{manifest.step}\0{manifest.epoch}\0{manifest.round}"
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def sweep(directory: Path = _SHARED_MEMORY, dry_run: bool = False) -> list[tuple[Path, int]]:
    """Remove the rings of this user's processes that were killed; return each with its bytes. Raises nothing."""
    swept = []
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{_prefix()}*"):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    size = os.fstat(fd).st_blocks * 512
                    if is_unused(fd, path) if dry_run else remove_if_unused(fd, path):
                        swept.append((path, size))
                finally:
                    os.close(fd)
    return swept


def read_segments(
    file: ReadFile,
    segments: Sequence[Segment | BoxSegment],
    direct: bool,
    shared: SharedBlocks | None,
    peer: PeerFile | None,
    soon: Sequence[Segment | BoxSegment] = (),
) -> list[int]:
    """Do as ``bulk_io.read``, in the best available way.

    ``shared``: with other processes, unless directly; ``peer``: not from the file; ``soon``: see ``wanted_soon``.
    """
    if shared is not None and not direct:
        return shared.read(file, segments, peer, soon)
    return peer.read(segments) if peer is not None else file.read(segments, direct)


def _read_some(
    file: ReadFile, segments: Sequence[Segment | BoxSegment], some: Sequence[int], direct: bool, peer: PeerFile | None
) -> list[int]:
    return read_segments(file, [segments[index] for index in some], direct, None, peer) if some else []


def _prefix() -> str:
    return f"resilio-blocks-{os.geteuid()}-"
