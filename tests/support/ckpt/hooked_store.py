"""A store whose calls are counted, delayed, held up, refused, or the last ones of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from resilio_hpc.ckpt.format.bulk_io import Block, BoxSegment, PageRun, Segment
from resilio_hpc.ckpt.format.files import NewFile, ReadFile
from resilio_hpc.ckpt.store.backend import Store, StoreEntry

Hook = Callable[[str], None]
"""Called before each call that reaches the store, with its name; what it raises is what the call raises."""


class Killed(BaseException):
    """The process ends here: no code of it runs any more that catches errors."""


class HookedStore(Store):
    """``store``, with ``before`` called first. A context that begins in a killed process is never left in order."""

    def __init__(self, store: Store, before: Hook) -> None:
        self._store, self._before = store, before

    def names(self, directory: Path, steps: bool = True) -> list[str]:
        self._before("names")
        return self._store.names(directory, steps)

    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        self._before("look")
        return self._store.look(path, follow)

    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        self._before("read")
        return self._store.read(path, limit, follow)

    def open(self, path: Path, follow: bool = True) -> ReadFile:
        self._before("open")
        return HookedFile(self._store.open(path, follow), self._before)

    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        self._before("write")
        self._store.write(path, data, durable)

    def create(self, path: Path, data: bytes = b"") -> bool:
        self._before("create")
        return self._store.create(path, data)

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[NewFile]:
        self._before("new_file")
        with self._store.new_file(path, mode, former) as file:
            yield HookedNewFile(file, self._before)
            self._before("appear")

    def make_directory(self, path: Path) -> None:
        self._before("make_directory")
        self._store.make_directory(path)

    def make_new_directory(self, path: Path) -> None:
        self._before("make_new_directory")
        self._store.make_new_directory(path)

    def put_in_place(
        self, staging: Path, final: Path, check: Callable[[Path], None], last_look: Callable[[], object] = lambda: None
    ) -> None:
        last_look()
        self._before("put_in_place")
        self._store.put_in_place(staging, final, check)

    def move_away(self, path: Path, why: str) -> Path:
        self._before("move_away")
        return self._store.move_away(path, why)

    def is_moved_away(self, name: str) -> bool:
        return self._store.is_moved_away(name)

    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            self._before("remove")
            self._store.remove(path, ignore_errors)

    def recycle(self, gone: Path, recycled: Path) -> None:
        self._before("recycle")
        self._store.recycle(gone, recycled)

    def sync(self, directory: Path) -> None:
        self._before("sync")
        self._store.sync(directory)

    def refresh(self, directory: Path) -> None:
        with contextlib.suppress(OSError):
            self._before("refresh")
        self._store.refresh(directory)

    def free_bytes(self, directory: Path) -> int:
        self._before("free_bytes")
        return self._store.free_bytes(directory)


class HookedFile:
    """A file that is open for reading."""

    def __init__(self, file: ReadFile, before: Hook) -> None:
        self._file, self._before = file, before
        self.size_bytes, self.identity, self.reads_far_ahead = file.size_bytes, file.identity, True

    def pread(self, size: int, offset: int) -> bytes:
        self._before("pread")
        return self._file.pread(size, offset)

    def read(self, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
        self._before("read segments")
        return self._file.read(segments, direct)

    def read_pages(self, memory: memoryview, offset: int) -> int:
        self._before("read_pages")
        return self._file.read_pages(memory, offset)

    def read_ahead(self, offset: int, size: int) -> None:
        self._before("read_ahead")
        self._file.read_ahead(offset, size)

    def close(self) -> None:
        self._file.close()


class HookedNewFile:
    """A file that is being written."""

    def __init__(self, file: NewFile, before: Hook) -> None:
        self._file, self._before = file, before
        self.is_recycled = file.is_recycled

    def allocate(self, size_bytes: int) -> None:
        self._before("allocate")
        self._file.allocate(size_bytes)

    def pread(self, size: int, offset: int) -> bytes:
        self._before("pread")
        return self._file.pread(size, offset)

    def write_small(self, data: memoryview, offset: int) -> None:
        self._before("write_small")
        self._file.write_small(data, offset)

    def write(
        self, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
    ) -> int | None:
        self._before("write pieces")
        return self._file.write(memory, pieces, blocks, bytes_per_s)
