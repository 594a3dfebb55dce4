"""A store in the memory of one process: no directory of a file system, no rename of files, no links.

Several clients may look at one ``Tree``. A client may list as a network file system does: what it saw once, until it
asks afresh.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from resilio_hpc.ckpt.format.files import NewFile
from resilio_hpc.ckpt.store.backend import EntryKind, Store, StoreEntry
from resilio_hpc.ckpt.store.posix import PosixFile, PosixNewFile
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.regular_file import NotRegular


class Tree:
    """What all clients see. A file is an open descriptor of memory without a name; None: a directory."""

    def __init__(self, root: Path, capacity_bytes: int = 1 << 40) -> None:
        self.root, self.capacity_bytes = root, capacity_bytes
        self.lock = threading.RLock()
        self.entries: dict[Path, int | None] = {root: None}
        self.changed: dict[Path, int] = {root: 0}

    def below(self, path: Path) -> list[Path]:
        """The path and all that it has."""
        return [each for each in self.entries if each.is_relative_to(path)]

    def move(self, path: Path, target: Path) -> None:
        """Give a directory, or a file, another name."""
        if path not in self.entries:
            raise _missing(path)
        for each in self.below(path):
            self.put(target / each.relative_to(path), self.entries.pop(each), self.changed.pop(each))

    def put(self, path: Path, content: int | None, changed_ns: int | None = None) -> None:
        """Let a path have a content."""
        if self.entries.get(path.parent, 0) is not None:
            raise _missing(path.parent)
        former = self.entries.get(path)
        if former is not None and former != content:
            os.close(former)
        self.entries[path] = content
        self.changed[path] = time.time_ns() if changed_ns is None else changed_ns

    def drop(self, path: Path) -> None:
        """Remove a path, and all below it."""
        for each in self.below(path):
            content = self.entries.pop(each)
            del self.changed[each]
            if content is not None:
                os.close(content)

    def used_bytes(self) -> int:
        """What all files have."""
        return sum(os.fstat(content).st_size for content in self.entries.values() if content is not None)

    def close(self) -> None:
        """Give the memory back."""
        self.drop(self.root)


class MemoryStore(Store):
    """One client.

    ``lists_stale``: a directory is listed as it was at the first look, until this client changes or refreshes it.
    """

    def __init__(self, tree: Tree, lists_stale: bool = False) -> None:
        self.tree, self.lists_stale = tree, lists_stale
        self._listed: dict[Path, list[str]] = {}

    def names(self, directory: Path, steps: bool = True) -> list[str]:
        with self.tree.lock:
            if directory not in self.tree.entries:
                raise _missing(directory)
            if self.tree.entries[directory] is not None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
            now = [path.name for path in self.tree.entries if path.parent == directory and path != self.tree.root]
            return self._listed.setdefault(directory, now) if self.lists_stale else now

    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        with self.tree.lock:
            if path not in self.tree.entries:
                return None
            content, changed_ns = self.tree.entries[path], self.tree.changed[path]
            if content is None:
                return StoreEntry(EntryKind.DIRECTORY, 0, changed_ns)
            return StoreEntry(EntryKind.FILE, os.fstat(content).st_size, changed_ns)

    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        with contextlib.closing(self.open(path)) as file:
            return file.pread(file.size_bytes if limit < 0 else limit, 0)

    def open(self, path: Path, follow: bool = True) -> PosixFile:
        with self.tree.lock:
            if path not in self.tree.entries:
                raise _missing(path)
            content = self.tree.entries[path]
            if content is None:
                raise NotRegular(errno.EINVAL, "it is a directory, not a regular file", str(path))
            return PosixFile(os.dup(content))

    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        with self.new_file(path) as file:
            file.write_small(memoryview(data), 0)

    def create(self, path: Path, data: bytes = b"") -> bool:
        with self.tree.lock:
            if path in self.tree.entries:
                return False
            self.write(path, data)
            return True

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[NewFile]:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        try:
            if path.parent not in self.tree.entries:
                raise _missing(path.parent)
            yield PosixNewFile(descriptor)
            with self.tree.lock:
                if self.free_bytes(path) < os.fstat(descriptor).st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                self._put(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def make_directory(self, path: Path) -> None:
        with self.tree.lock:
            for each in [*reversed(path.parents), path]:
                if each.is_relative_to(self.tree.root) and each not in self.tree.entries:
                    self._put(each, None)

    def make_new_directory(self, path: Path) -> None:
        with self.tree.lock:
            if path in self.tree.entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            self._put(path, None)

    def put_in_place(
        self, staging: Path, final: Path, check: Callable[[Path], None], last_look: Callable[[], object] = lambda: None
    ) -> None:
        last_look()
        with self.tree.lock:
            self._listed.clear()
            former = self.move_away(final, "replaced")
            if former in self.tree.entries:
                try:
                    check(former)
                except CheckpointError:
                    self.tree.move(former, final)
                    raise
            self.tree.move(staging, final)

    def move_away(self, path: Path, why: str) -> Path:
        target = path.with_name(f"~{why}-{path.name}-{time.monotonic_ns()}")
        self._listed.clear()
        with self.tree.lock, contextlib.suppress(FileNotFoundError):
            self.tree.move(path, target)
        return target

    def is_moved_away(self, name: str) -> bool:
        return name.startswith("~")

    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        self._listed.clear()
        with self.tree.lock:
            self.tree.drop(path)

    def recycle(self, gone: Path, recycled: Path) -> None:
        """Keep nothing: fresh memory costs no more."""

    def sync(self, directory: Path) -> None:
        if directory not in self.tree.entries:
            raise _missing(directory)

    def refresh(self, directory: Path) -> None:
        self._listed.pop(directory, None)

    def _put(self, path: Path, content: int | None) -> None:
        self._listed.clear()
        self.tree.put(path, content)

    def free_bytes(self, directory: Path) -> int:
        with self.tree.lock:
            return self.tree.capacity_bytes - self.tree.used_bytes()


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
