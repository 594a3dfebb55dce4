"""Interfaces of a checkpoint's open files, whichever store they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resilio_hpc.ckpt.format.bulk_io import Block, BoxSegment, PageRun, Segment


class ReadFile(Protocol):
    """A file that is open for reading, from any thread. Methods raise OSError for a device that fails."""

    @property
    def size_bytes(self) -> int:
        """Return the size when the file was opened."""

    @property
    def identity(self) -> tuple[int, int]:
        """Return two 64-bit numbers that identify this content in all processes of this node."""

    @property
    def reads_far_ahead(self) -> bool:
        """Return whether reads in order are fast without ``read_ahead``."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer at the end of the file."""

    def read(self, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
        """Do as ``bulk_io.read``."""

    def read_pages(self, memory: memoryview, offset: int) -> int:
        """Fill whole pages of memory from a page of the file on, past caches if possible; return the bytes read."""

    def read_ahead(self, offset: int, size: int) -> None:
        """Read a range into a cache in the background."""

    def close(self) -> None:
        """Close the file."""


class HasFile(Protocol):
    """Gives a file that may be replaced by another one with the same content: ask for it before each read."""

    @property
    def file(self) -> ReadFile:
        """Return the file that is open now."""


class NewFile(Protocol):
    """A file that is being written. Methods raise OSError."""

    @property
    def is_recycled(self) -> bool:
        """Return whether it holds the bytes of a former file, which are to be overwritten."""

    def allocate(self, size_bytes: int) -> None:
        """Allocate all of it at once, so that a full disk shows now."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes written from ``offset`` on."""

    def write_small(self, data: memoryview, offset: int) -> None:
        """Write all of it through a cache."""

    def write(
        self, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
    ) -> int | None:
        """Do as ``bulk_io.write``."""
