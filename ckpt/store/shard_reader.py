"""A shard file of a committed step, open for reading: its tables and trees, verified as they are read."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from resilio_hpc.ckpt.format.files import ReadFile
from resilio_hpc.ckpt.format.manifest import Extent, RankRecord, RankTable, ShardRecord, read_table, sha256
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.regular_file import NotRegular
from resilio_hpc.native import crc32c


class ShardReader:
    """A shard file.

    Methods raise CorruptCheckpoint for bytes that do not match, and OSError for a device that fails.
    """

    def __init__(self, directory: Path, shard: ShardRecord, follow: bool = True) -> None:
        """Open it; ``directory``: of the step. ``follow``: the file may be a link."""
        self.shard, self._follow = shard, follow
        self.file = self._open(directory)
        """Open; another one after ``move_to``."""

    def _open(self, directory: Path) -> ReadFile:
        self._name = f"{directory.name}/{self.shard.file}"
        try:
            file = store_of(directory).open(directory / self.shard.file, self._follow)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{self._name} is missing") from error
        except NotRegular as error:
            raise CorruptCheckpoint(f"{self._name}: {error.strerror}") from error
        if file.size_bytes != self.shard.size_bytes:
            file.close()
            raise CorruptCheckpoint(f"{self._name} does not have {self.shard.size_bytes} bytes, but {file.size_bytes}")
        return file

    def move_to(self, directory: Path) -> None:
        """From now on read the file of that name in another directory."""
        self._follow = True  # the committed file
        former, self.file = self.file, self._open(directory)
        former.close()

    def table(self, rank: RankRecord) -> RankTable:
        """Return the table of a rank's part."""
        data = self._read(rank.table)
        if crc32c(data) != rank.table.crc32c or sha256(data) != rank.table_sha256:
            raise CorruptCheckpoint(f"{self._name}: the table of rank {rank.rank} does not match its checksum")
        return read_table(data, self.shard.size_bytes)

    def tree(self, rank: RankRecord, table: RankTable) -> bytes:
        """Return the tree of a rank's plain values, without its padding."""
        data = self._read(table.tree)
        if crc32c(data) != table.tree.crc32c:
            raise CorruptCheckpoint(f"{self._name}: the tree of rank {rank.rank} does not match its checksum")
        return data.rstrip(b" ")

    def _read(self, extent: Extent) -> bytes:
        data = self.file.pread(extent.size_bytes, extent.offset)
        if len(data) < extent.size_bytes:
            raise CorruptCheckpoint(f"{self._name} ends too early")
        return data

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
