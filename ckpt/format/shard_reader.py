"""A shard file of a committed step, open for reading: its tables and trees, verified as they are read."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from resilio_hpc.ckpt.format.manifest import Extent, RankRecord, ShardRecord, Table, read_table, sha256
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.regular_file import NotRegular, open_file
from resilio_hpc.native import crc32c


class ShardReader:
    """All methods raise CorruptCheckpoint for what is not as it was written, and OSError for a device that fails."""

    def __init__(self, directory: Path, shard: ShardRecord, follow: bool = True) -> None:
        """``directory``: of the step. ``follow``: may the file be a link?"""
        self.shard, self._follow = shard, follow
        self.fd = self._open(directory)

    def _open(self, directory: Path) -> int:
        self._name = f"{directory.name}/{self.shard.file}"
        try:
            fd = open_file(directory / self.shard.file, follow=self._follow)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{self._name} is missing") from error
        except NotRegular as error:
            raise CorruptCheckpoint(f"{self._name}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size != self.shard.size_bytes:
            os.close(fd)
            raise CorruptCheckpoint(f"{self._name} does not have {self.shard.size_bytes} bytes, but {size}")
        return fd

    def move_to(self, directory: Path) -> None:
        """From now on read the file of that name in another directory. ``fd`` stays the same number."""
        self._follow = True  # the committed one
        fd = self._open(directory)
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    def table(self, rank: RankRecord) -> Table:
        """Everything about a rank's part."""
        data = self._read(rank.table)
        if crc32c(data) != rank.table.crc32c or sha256(data) != rank.table_sha256:
            raise CorruptCheckpoint(f"{self._name}: the table of rank {rank.rank} does not match its checksum")
        return read_table(data, self.shard.size_bytes)

    def tree(self, rank: RankRecord, table: Table) -> bytes:
        """Return the tree of a rank's plain values, without the spaces that fill up its room."""
        data = self._read(table.tree)
        if crc32c(data) != table.tree.crc32c:
            raise CorruptCheckpoint(f"{self._name}: the tree of rank {rank.rank} does not match its checksum")
        return data.rstrip(b" ")

    def _read(self, extent: Extent) -> bytes:
        data = bytearray()
        while len(data) < extent.size_bytes:
            more = os.pread(self.fd, extent.size_bytes - len(data), extent.offset + len(data))
            if not more:
                raise CorruptCheckpoint(f"{self._name} ends too early")
            data += more
        return bytes(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
