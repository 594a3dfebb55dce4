"""Open files of a checkpoint: what reads and writes of their bytes need, whichever store they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resilio_hpc.ckpt.format.bulk_io import Block, BoxSegment, PageRun, Segment


class ReadFile(Protocol):
    """A file that is open for reading, from any thread. Methods raise OSError for a device that fails."""

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""

    @property
    def identity(self) -> tuple[int, int]:
        """Two numbers of 64 bits that only this content has, the same in all processes of this node."""

    @property
    def reads_far_ahead(self) -> bool:
        """Whether reads in order are fast without ``read_ahead``."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer at the end of the file."""

    def read(self, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
        """As ``bulk_io.read``."""

    def read_pages(self, memory: memoryview, offset: int) -> int:
        """Fill whole pages of memory from a page of the file on, past caches if possible; how many bytes came."""

    def read_ahead(self, offset: int, size: int) -> None:
        """Have a range come closer, in the background."""

    def close(self) -> None:
        """Close the file."""


class HasFile(Protocol):
    """The file may become another one with the same content: ask for it before each read."""

    @property
    def file(self) -> ReadFile:
        """The file that is open now."""


class NewFile(Protocol):
    """A file that is being written. Methods raise OSError."""

    @property
    def is_recycled(self) -> bool:
        """Whether it has the bytes of a former file, which are to be written over."""

    def allocate(self, size_bytes: int) -> None:
        """Take the whole room at once, so that a full disk shows now."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return what was written from ``offset`` on."""

    def write_small(self, data: memoryview, offset: int) -> None:
        """Write all of it, by way of a cache."""

    def write(
        self, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
    ) -> int | None:
        """As ``bulk_io.write``."""
