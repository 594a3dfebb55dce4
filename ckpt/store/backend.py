"""The one interface to the stores where committed steps live.

A ``Store`` has directories of checkpoints; ``mounts`` tells which store a path belongs to. All other code uses it, and
itself opens, lists, commits, or removes nothing of a directory of checkpoints.
"""

from __future__ import annotations

import abc
import errno
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from resilio_hpc.ckpt.format.extents import in_order
from resilio_hpc.ckpt.format.files import NewFile, ReadFile

_LEFT_BYTES = 1 << 20


class EntryKind(Enum):
    """The kinds of entries in a store."""

    FILE = auto()
    DIRECTORY = auto()
    OTHER = auto()
    """A link, a device, a pipe: nothing that a store made."""


class StoreEntry(NamedTuple):
    """An entry. ``changed_ns``: when it was changed last, by the store's clock."""

    kind: EntryKind
    size_bytes: int
    changed_ns: int


class Store(abc.ABC):
    """Directories of files, with an atomic commit. All methods raise OSError, as the calls of a file system do.

    FileNotFoundError means that the name does not exist, and ``regular_file.NotRegular`` that it is no file. Another
    error tells nothing about that.
    """

    @abc.abstractmethod
    def names(self, directory: Path, steps: bool = True) -> list[str]:
        """Return the names in a directory. ``steps`` False: those of committed steps may be left out."""

    @abc.abstractmethod
    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        """Return the entry of this name; None without one. ``follow``: that of a link's target."""

    @abc.abstractmethod
    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        """Return a file's content, at most ``limit`` bytes. ``follow`` False: a link is refused."""

    @abc.abstractmethod
    def open(self, path: Path, follow: bool = True) -> ReadFile:
        """Open a file for reads of many of its bytes."""

    @abc.abstractmethod
    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        """Replace a file's content: readers see the old one or the new one, whole."""

    @abc.abstractmethod
    def create(self, path: Path, data: bytes = b"") -> bool:
        """Make a small file; return False if that name exists."""

    @abc.abstractmethod
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> AbstractContextManager[NewFile]:
        """Give a file that appears whole and durable at the end of the context; after an error nothing remains.

        ``former``: a file that has no use any more and may be overwritten.
        """

    @abc.abstractmethod
    def make_directory(self, path: Path) -> None:
        """Make a directory, with those above it, durable on return. It may exist."""

    @abc.abstractmethod
    def make_new_directory(self, path: Path) -> None:
        """Make a directory. Raises FileExistsError if it exists."""

    @abc.abstractmethod
    def put_in_place(
        self, staging: Path, final: Path, check: Callable[[Path], None], last_look: Callable[[], object] = lambda: None
    ) -> None:
        """Commit: at every instant ``final`` is the former directory of that name, or the one of ``staging``.

        ``check`` is called with the former one and raises CheckpointError for one that must stay. ``last_look`` is
        called as late as possible, and raises CheckpointError, OSError where nothing may be committed.
        """

    @abc.abstractmethod
    def move_away(self, path: Path, why: str) -> Path:
        """Rename it away at once: a step exists whole, or not at all. Return the new path, which may not exist.

        ``why``: "removed" or "replaced". ``remove`` then removes it.
        """

    @abc.abstractmethod
    def is_moved_away(self, name: str) -> bool:
        """Return whether a name is from ``move_away``, or from a write that a dead process did not finish."""

    @abc.abstractmethod
    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        """Remove a file, or a directory with its content. Of a link only the link is removed."""

    @abc.abstractmethod
    def recycle(self, gone: Path, recycled: Path) -> None:
        """Keep the shard files of a directory that was moved away in ``recycled``, where they may be overwritten."""

    @abc.abstractmethod
    def sync(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    @abc.abstractmethod
    def refresh(self, directory: Path) -> None:
        """See what other machines have just written to a directory. Raises nothing."""

    @abc.abstractmethod
    def free_bytes(self, directory: Path) -> int:
        """Return how many more bytes can be written there."""

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """Return the results of calls of which none needs another: in this order, or side by side.

        Raises the error of the first of them that fails, once none is at work.
        """
        return in_order(*calls)

    def size_of(self, path: Path, follow: bool = True) -> int:
        """Return the size of a file; -1 where no file has that name, or it cannot be read. Raises nothing."""
        try:
            found = self.look(path, follow)
        except OSError:
            return -1
        return found.size_bytes if found is not None and found.kind is EntryKind.FILE else -1

    def sizes(self, directory: Path, names: Sequence[str], follow: bool = True) -> list[int]:
        """Return the ``size_of`` each of these files. Raises nothing."""
        return [self.size_of(directory / name, follow) for name in names]

    def check_space(self, directory: Path, size_bytes: int, former: Path | None = None) -> None:
        """Raise OSError where so much surely does not fit, before the store is full: other users write there.

        ``former``: see ``new_file``.
        """
        if former is not None:
            size_bytes -= max(0, self.size_of(former, follow=False))
        if self.free_bytes(directory) < size_bytes + _LEFT_BYTES:
            raise OSError(errno.ENOSPC, f"no space left for {size_bytes} bytes", str(directory))

    def is_directory(self, path: Path, follow: bool = False) -> bool:
        """Return whether it is a directory. Raises nothing."""
        try:
            found = self.look(path, follow)
        except OSError:
            return False
        return found is not None and found.kind is EntryKind.DIRECTORY

    def exists(self, path: Path) -> bool:
        """Return whether the name exists. Raises OSError where that is unknown."""
        return self.look(path) is not None
