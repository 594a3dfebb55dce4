"""The shard files of a committed step, open: copies on the node's own disk where they are good, else the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from resilio_hpc.ckpt.records import ShardRecord
from resilio_hpc.ckpt.shard_reader import ShardReader
from resilio_hpc.core.errors import CorruptCheckpoint

Result = TypeVar("Result")
Read = TypeVar("Read", bound=tuple[Any, ...])


class ShardFiles:
    """A copy counts while what is read from it is what the manifest and the tables say. One that does not is removed,
    and the committed file is read in its place, under the same descriptor."""

    def __init__(self, directory: Path, copies: Mapping[str, Path]) -> None:
        """``directory``: of the committed step. ``copies``: by the name of a file, the directory with a copy of it."""
        self._directory = directory
        self._copies = copies
        self._readers: dict[str, ShardReader] = {}
        self._local: dict[int, ShardReader] = {}

    @property
    def are_local(self) -> bool:
        """Was everything read from copies?"""
        return len(self._local) == len(self._readers)

    def reader(self, shard: ShardRecord) -> ShardReader:
        """The file of a shard. Raises CorruptCheckpoint, OSError."""
        if shard.file not in self._readers:
            reader = self._open_copy(shard)
            if reader is not None:
                self._local[reader.fd] = reader
            self._readers[shard.file] = reader or ShardReader(self._directory, shard)
        return self._readers[shard.file]

    def _open_copy(self, shard: ShardRecord) -> ShardReader | None:
        if shard.file not in self._copies:
            return None
        try:
            return ShardReader(self._copies[shard.file], shard)
        except (CorruptCheckpoint, OSError) as error:
            self._remove(shard, error)
            return None

    def read(self, fd: int, act: Callable[[], Result]) -> Result:
        """What ``act`` reads from a file, or once more from the committed one. Raises CorruptCheckpoint, OSError."""
        try:
            return act()
        except (CorruptCheckpoint, OSError) as error:
            reader = self._local.pop(fd, None)
            if reader is None:
                raise
            self._remove(reader.shard, error)
            reader.move_to(self._directory)
        return act()

    def by_copy(self, reads: Iterable[Read]) -> Mapping[int, list[Read]]:
        """Reads, which begin with a descriptor, by the copy that they are of; -1: of committed files."""
        found: dict[int, list[Read]] = {}
        for read in reads:
            found.setdefault(read[0] if read[0] in self._local else -1, []).append(read)
        return found

    def _remove(self, shard: ShardRecord, error: Exception) -> None:
        path = self._copies[shard.file] / shard.file
        try:
            path.unlink()
        except FileNotFoundError:
            return  # its writer was faster, or another rank, which has told
        except OSError:
            pass  # of a disk that is read-only, or has failed; the next life finds it so, too
        print(f"resilio: {path} is bad, {self._directory} is read instead: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close them all."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
