"""Saves through a disk of the node's own: first to that disk, and from there to the shared file system.

One thread does all work on that disk. So a disk that hangs costs a save its shortcut, or that save, but no later one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.saver.messages import Local, Persist
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.shard_copy import copy_shard
from resilio_hpc.ckpt.tiers import bounded_io
from resilio_hpc.ckpt.tiers.bounded_io import PATIENCE, Activity, Patience
from resilio_hpc.ckpt.tiers.local_disk import FULL, LocalDisk
from resilio_hpc.core import bounded
from resilio_hpc.core.errors import CorruptCheckpoint

_LOST = "memory had been let go by then, so this save is lost"
_hung: dict[str, Future[ShardRecord | OSError]] = {}  # by the disk's directory: work that has not ended


@dataclass
class LocalWay:
    """One save.

    ``let_go``: called as soon as the arenas are not needed any more, before ``say``; ``staging``: returns the directory
    on the shared file system; ``patience``: after that the node's disk counts as hung; ``own``: see
    ``shard_file.write_shard``.
    """

    request: Persist
    arenas: Sequence[ArenaSource]
    let_go: Callable[[], None]
    say: Callable[[Local], None]
    staging: Callable[[], Path]
    patience: Patience = PATIENCE
    own: Mapping[int, frozenset[int]] = field(default_factory=dict)
    _disk: LocalDisk | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # for the next two fields
    _copy: Path | None = None  # the file on that disk, once it is durable
    _given_up: bool = False

    def take(self) -> ShardRecord | OSError:
        """Run it. Return the record of the file; or that disk's error, while memory still holds everything.

        Raises CorruptCheckpoint for what that disk lost afterwards, OSError for the shared file system.
        """
        directory, patience_s = self.request.local, self.patience.silent_s
        if directory in _hung and not _hung[directory].done():
            return bounded.no_answer(patience_s)
        _hung.pop(directory, None)
        future = bounded.begin(self._go)
        while True:
            before = Activity.now()
            self.patience.wait([future], patience_s)
            if future.done():
                return future.result()
            if Activity.now().has_stopped(before) and not self._disk_answers():
                _hung[directory] = future
                self._give_up(patience_s)
                return bounded.no_answer(patience_s)

    def _disk_answers(self) -> bool:
        """Return whether the disk answers, so that the shared file system is the one that hangs.

        An error is an answer too.
        """
        if self._disk is None:
            return False
        try:
            bounded_io.in_time(self._disk.try_out, self.patience)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _give_up(self, patience_s: float) -> None:
        """Give up the disk. Raises CorruptCheckpoint when the arenas were released already."""
        with self._lock:
            self._given_up = True
            if self._copy is not None:
                raise CorruptCheckpoint(f"{self._copy.parent}: {bounded.no_answer(patience_s).strerror}; {_LOST}")

    def _go(self) -> ShardRecord | OSError:
        """Do the work, in the thread."""
        started = time.monotonic()
        request = self.request
        with ExitStack() as locked:
            try:
                local, directory = Path(request.local), Path(request.directory)
                disk = locked.enter_context(LocalDisk(local, directory, request.holder, self.patience))
                self._disk = disk
                where, written = self._write(disk)
                record = msgspec.structs.replace(written, node=request.holder)
                disk.drop_recycled()
            except OSError as error:
                return error
            with self._lock:
                seconds = time.monotonic() - started
                if self._given_up:  # it came back too late: the arenas may hold another step
                    return bounded.no_answer(seconds)
                self._copy = where / record.file
                self.let_go()
                self.say(Local(request.step, record.size_bytes, seconds))
            try:
                copy_shard(where, record, self.staging(), request.bytes_per_s, checkpoint_index.recycled(directory))
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(f"{error}; {_LOST}") from error
            return record

    def _write(self, disk: LocalDisk) -> tuple[Path, ShardRecord]:
        """Write the file to that disk; where it is full, older steps there make room. Raises OSError."""
        from resilio_hpc.ckpt.store.shard_file import write_shard

        request = self.request
        size = sum(arena.header.size_bytes for arena in self.arenas)
        keep = request.local_keep
        while True:
            try:
                where = disk.new_step(request.step, request.epoch, request.round, size, keep)
                return where, write_shard(
                    self.arenas, where, request.node_rank, 0o600, verify=request.verify, recycled=disk.recycled,
                    own=self.own,
                )  # fmt: skip
            except OSError as error:
                if error.errno not in FULL or keep == 1:
                    raise
                keep = 1
