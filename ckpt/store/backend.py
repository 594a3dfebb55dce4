"""The one interface to where committed steps live.

A ``Store`` has directories of checkpoints: ``mounts`` tells which one a path belongs to. All other code asks it, and
opens, lists, commits, or removes nothing of a directory of checkpoints by itself.
"""

from __future__ import annotations

import abc
import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.format.files import NewFile, ReadFile

_LEFT_BYTES = 1 << 20


class EntryKind(Enum):
    """What has a name in a store."""

    FILE = auto()
    DIRECTORY = auto()
    OTHER = auto()
    """A link, a device, a pipe: nothing that a store made."""


class StoreEntry(NamedTuple):
    """``changed_ns``: when it was changed last, by the store's clock."""

    kind: EntryKind
    size_bytes: int
    changed_ns: int


class Store(abc.ABC):
    """Directories of files, whose commit is atomic. All methods raise OSError, as the calls of a file system do.

    FileNotFoundError means that a name is not there, and ``regular_file.NotRegular`` that it is no file. An error of
    another kind tells nothing about that.
    """

    @abc.abstractmethod
    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory."""

    @abc.abstractmethod
    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        """Return what has this name; None where nothing has. ``follow``: look at what a link leads to."""

    @abc.abstractmethod
    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        """Return what is in a file, at most ``limit`` bytes. ``follow`` False: a link is refused."""

    @abc.abstractmethod
    def open(self, path: Path, follow: bool = True) -> ReadFile:
        """Open a file for reads of many of its bytes."""

    @abc.abstractmethod
    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        """Let a file have this content: readers see the old one or the new one, whole."""

    @abc.abstractmethod
    def create(self, path: Path, data: bytes = b"") -> bool:
        """Make a small file, unless that name is there: then False."""

    @abc.abstractmethod
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> AbstractContextManager[NewFile]:
        """Give a file that appears whole and durable at the end of the context; after an error nothing remains.

        ``former``: a file that is needed no more and may be written over.
        """

    @abc.abstractmethod
    def make_directory(self, path: Path) -> None:
        """Make a directory, with those above it, durable on return. It may be there."""

    @abc.abstractmethod
    def make_new_directory(self, path: Path) -> None:
        """Make a directory. Raises FileExistsError where it is there."""

    @abc.abstractmethod
    def put_in_place(self, staging: Path, final: Path, check: Callable[[Path], None]) -> None:
        """Commit: ``final`` is the former directory of that name at every instant, or the one of ``staging``.

        ``check`` is called with the former one and raises CheckpointError for one that has to stay.
        """

    @abc.abstractmethod
    def move_away(self, path: Path, why: str) -> Path:
        """Take a name away at once: a step is there whole, or not at all. Returns the new path; it may not exist.

        ``why``: "removed" or "replaced". What was moved away goes with ``remove``.
        """

    @abc.abstractmethod
    def is_moved_away(self, name: str) -> bool:
        """Whether a name is of what ``move_away`` renamed, or of a write that a dead process did not finish."""

    @abc.abstractmethod
    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        """Remove a file, or a directory with all that is in it. A link goes, what it leads to stays."""

    @abc.abstractmethod
    def recycle(self, gone: Path, recycled: Path) -> None:
        """Keep the shard files of a directory that was moved away in ``recycled``, where they may be written over."""

    @abc.abstractmethod
    def sync(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    @abc.abstractmethod
    def refresh(self, directory: Path) -> None:
        """See what others have just written to a directory. Raises nothing."""

    @abc.abstractmethod
    def free_bytes(self, directory: Path) -> int:
        """Return how much more can be written there."""

    def size_of(self, path: Path, follow: bool = True) -> int:
        """Return the size of a file; -1 where no file has that name, or that cannot be seen. Raises nothing."""
        try:
            found = self.look(path, follow)
        except OSError:
            return -1
        return found.size_bytes if found is not None and found.kind is EntryKind.FILE else -1

    def check_space(self, directory: Path, size_bytes: int, former: Path | None = None) -> None:
        """Raise OSError where so much is sure not to fit, before the store is full to the brim: others write there.

        ``former``: see ``new_file``.
        """
        if former is not None:
            size_bytes -= max(0, self.size_of(former, follow=False))
        if self.free_bytes(directory) < size_bytes + _LEFT_BYTES:
            raise OSError(errno.ENOSPC, f"no space left for {size_bytes} bytes", str(directory))

    def is_directory(self, path: Path, follow: bool = False) -> bool:
        """Whether it is a directory. Raises nothing."""
        try:
            found = self.look(path, follow)
        except OSError:
            return False
        return found is not None and found.kind is EntryKind.DIRECTORY

    def exists(self, path: Path) -> bool:
        """Whether anything has that name. Raises OSError where that cannot be seen."""
        return self.look(path) is not None
