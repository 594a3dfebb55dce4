"""The file system as a store: a step gets or loses its name by one rename."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import Block, BoxSegment, PageRun, Segment
from resilio_hpc.ckpt.format.manifest import is_shard_name
from resilio_hpc.ckpt.store.backend import EntryKind, Store, StoreEntry
from resilio_hpc.core import regular_file
from resilio_hpc.core.durable import exchange, is_ours_alone, make_directory, new_file, sync_directory, write_atomic
from resilio_hpc.core.errors import CheckpointError

_GOING = re.compile(  # files of other programs beside the steps may have similar names
    r"\.(removed|replaced)-(step-\d{10,18}|staging-step-\d{10,18}-e\d{1,18}-r\d{1,18}(-s[0-9a-f]{1,32})?(-whole)?|worn)"
    r"-\d+-[0-9a-f]{8}"
)
_UNFINISHED = re.compile(r"\.latest\.[a-z0-9_]{8}\.tmp")  # left by a process that died while it wrote `latest`
_KINDS = {stat.S_IFREG: EntryKind.FILE, stat.S_IFDIR: EntryKind.DIRECTORY}


class PosixFile:
    """A file that is open for reading (``ReadFile``). It owns its descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor."""
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self.size_bytes = found.st_size
        self.identity = found.st_dev, found.st_ino
        self._lock = threading.Lock()
        self._direct = -1

    @property
    def reads_far_ahead(self) -> bool:
        """See ReadFile."""
        return bulk_io.is_read_ahead_far(self._descriptor)

    def pread(self, size: int, offset: int) -> bytes:
        """See ReadFile."""
        return _pread(self._descriptor, size, offset)

    def read(self, segments: Sequence[Segment | BoxSegment], direct: bool = True) -> list[int]:
        """See ReadFile."""
        return bulk_io.read(self._descriptor, segments, direct)

    def read_pages(self, memory: memoryview, offset: int) -> int:
        """See ReadFile."""
        with self._lock:
            if self._direct < 0:
                self._direct = bulk_io.open_direct(self._descriptor)
        return os.preadv(self._direct, [memory], offset)

    def read_ahead(self, offset: int, size: int) -> None:
        """See ReadFile."""
        bulk_io.read_ahead(self._descriptor, offset, size)

    def close(self) -> None:
        """See ReadFile."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1


class PosixNewFile:
    """A file that is being written (``NewFile``). It does not own its descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Use a descriptor that is open for reads and writes."""
        self._descriptor = descriptor
        self.is_recycled = os.fstat(descriptor).st_size > 0

    def allocate(self, size_bytes: int) -> None:
        """See NewFile."""
        if self.is_recycled:
            os.ftruncate(self._descriptor, size_bytes)
        if size_bytes:
            os.posix_fallocate(self._descriptor, 0, size_bytes)

    def pread(self, size: int, offset: int) -> bytes:
        """See NewFile."""
        return _pread(self._descriptor, size, offset)

    def write_small(self, data: memoryview, offset: int) -> None:
        """See NewFile."""
        bulk_io.write_cached(self._descriptor, data, offset)

    def write(
        self, memory: memoryview, pieces: Sequence[PageRun], blocks: Sequence[Block], bytes_per_s: float = 0.0
    ) -> int | None:
        """See NewFile."""
        return bulk_io.write(self._descriptor, memory, pieces, blocks, bytes_per_s)


class PosixStore(Store):
    """Directories of a file system. Links are followed for reads, never for writes."""

    def names(self, directory: Path, steps: bool = True) -> list[str]:
        """See Store."""
        return os.listdir(directory)  # noqa: PTH208 - names are wanted, not paths

    def look(self, path: Path, follow: bool = False) -> StoreEntry | None:
        """See Store."""
        try:
            found = path.stat(follow_symlinks=follow)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return StoreEntry(_KINDS.get(stat.S_IFMT(found.st_mode), EntryKind.OTHER), found.st_size, found.st_mtime_ns)

    def read(self, path: Path, limit: int = -1, follow: bool = True) -> bytes:
        """See Store."""
        return regular_file.read_file(path, limit, follow)

    def open(self, path: Path, follow: bool = True) -> PosixFile:
        """See Store."""
        return PosixFile(regular_file.open_file(path, follow=follow))

    def write(self, path: Path, data: bytes, durable: bool = True) -> None:
        """See Store."""
        write_atomic(path, data, durable=durable)

    def create(self, path: Path, data: bytes = b"") -> bool:
        """See Store."""
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o666, former: Path | None = None) -> Iterator[PosixNewFile]:
        """See Store."""
        with new_file(path, mode, former) as descriptor:
            yield PosixNewFile(descriptor)

    def make_directory(self, path: Path) -> None:
        """See Store."""
        make_directory(path)

    def make_new_directory(self, path: Path) -> None:
        """See Store."""
        path.mkdir()

    def put_in_place(
        self, staging: Path, final: Path, check: Callable[[Path], None], last_look: Callable[[], object] = lambda: None
    ) -> None:
        """See Store; ``check`` may get a former directory that has just appeared.

        A file system that cannot exchange two names (NFS) has neither for an instant; a kill just then loses the
        former. The new one has its own name by then: under that of the staging directory, the former could be taken for
        it.
        """
        last_look()
        if not os.path.lexists(final):
            try:
                staging.rename(final)
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        whole = staging.with_name(f"{staging.name}-whole")
        self.move_away(whole, "removed")  # left by a process that died at this point
        staging.rename(whole)
        if exchange(whole, final):
            try:
                check(whole)
            except CheckpointError:
                exchange(whole, final)
                raise
        else:
            check(final)
            former = self.move_away(final, "replaced")
            try:
                whole.rename(final)
            except OSError:
                former.rename(final)
                raise
        self.move_away(whole, "replaced")

    def move_away(self, path: Path, why: str) -> Path:
        """See Store."""
        target = path.with_name(f".{why}-{path.name.lstrip('.')}-{os.getpid()}-{os.urandom(4).hex()}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
        return target

    def is_moved_away(self, name: str) -> bool:
        """See Store."""
        return bool(_UNFINISHED.fullmatch(name) or _GOING.fullmatch(name))

    def remove(self, path: Path, ignore_errors: bool = True) -> None:
        """See Store."""
        regular_file.remove(path, ignore_errors)

    def recycle(self, gone: Path, recycled: Path) -> None:
        """See Store. Freeing the space of a large file and allocating as much costs as much as the write itself.

        A file is kept where no process has it open and it has no other name: see ``durable.new_file``.
        """
        if _strip(gone):
            self.move_away(recycled, "removed")
            gone.rename(recycled)

    def sync(self, directory: Path) -> None:
        """See Store."""
        sync_directory(directory)

    def refresh(self, directory: Path) -> None:
        """See Store. An NFS client may say for half a minute that a name is missing, unless it sees a change."""
        probe = directory / f".probe-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            probe.touch(exist_ok=False)  # not through a link
            probe.unlink()

    def free_bytes(self, directory: Path) -> int:
        """See Store."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize


def _strip(step: Path) -> bool:
    """Remove all but the shard files from the directory of a removed step; return whether they may be overwritten.

    Behind a link nothing is changed. Raises OSError.
    """
    if not regular_file.is_real_directory(step):
        return False  # a link to a step that lies elsewhere
    shards = []
    for path in list(step.iterdir()):
        if is_shard_name(path.name):
            shards.append(path)
        else:
            regular_file.remove(path, ignore_errors=False)
    if not shards:
        return False
    descriptor = regular_file.open_file(shards[0], os.O_RDWR)
    try:
        return is_ours_alone(descriptor)
    finally:
        os.close(descriptor)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    """Return all of it, or what exists before the end of the file."""
    data = os.pread(descriptor, size, offset)
    if len(data) in (0, size):
        return data
    parts = [data]
    while more := os.pread(descriptor, size - sum(map(len, parts)), offset + sum(map(len, parts))):
        parts.append(more)
    return b"".join(parts)
