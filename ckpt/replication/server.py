"""The sending side of the replicator: other nodes read snapshots of this node's memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.replication import borrowed_state, lost_ranks
from resilio_hpc.ckpt.replication.boundary_records import RecordFeed
from resilio_hpc.ckpt.replication.fabric import Fabric
from resilio_hpc.ckpt.replication.fabric_lane import lane_given
from resilio_hpc.ckpt.replication.messages import (
    ANY,
    TCP,
    TOKEN_BYTES,
    Given,
    Have,
    Life,
    Miss,
    Stream,
    Want,
    WantRecords,
    asking,
    giving,
)
from resilio_hpc.ckpt.replication.replica_copies import OpenedCopy, ReplicaCopies, ReplicaCopy, map_pinned, read_ranges
from resilio_hpc.ckpt.replication.transport import Lane, MemoryPart
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core import encrypted_stream, wire
from resilio_hpc.core.errors import CheckpointError, WireError
from resilio_hpc.core.helper_process import step_back

FORGOTTEN_S = 30.0
"""A snapshot that no caller has fetched within that time is let go: its reader is gone."""
STALLED_S = 120.0
"""A reader takes memory before it reads, which is long for a large snapshot; for longer it is not waited."""
_TOKEN_S = 5.0
_MAX_KEPT = 64
_MAX_STRANGERS = 256


class _Pinned(Protocol):
    """A pinned snapshot. ``page``: the first page of its arena."""

    page: bytes

    def parts(self, writable: bool) -> list[MemoryPart]:
        """Return what is to be given.

        ``writable``: map it so. Before Linux 6.2 memory that a device reads had to be.
        """

    def close(self) -> None:
        """Unpin it."""


class _PinnedArena:
    """A whole snapshot in an arena."""

    def __init__(self, file: int, size: int) -> None:
        self._file, self._size = file, size
        self.page = os.pread(file, PAGE, 0)

    def parts(self, writable: bool) -> list[MemoryPart]:
        """Return all behind the first page."""
        return [MemoryPart(map_pinned(self._file, self._size, writable), PAGE, self._size - PAGE)]

    def close(self) -> None:
        """Let it be overwritten."""
        os.close(self._file)


class _Ranges:
    """Bytes of a snapshot that were read at once, so that it is not pinned."""

    def __init__(self, data: bytes) -> None:
        self.page = data[:PAGE]
        self._data = data

    def parts(self, writable: bool) -> list[MemoryPart]:
        """Return the ranges."""
        return [MemoryPart(memoryview(self._data), PAGE, len(self._data) - PAGE)]

    def close(self) -> None:
        """Do nothing."""


class _Kept:
    """A pinned snapshot that a caller reads; it is unpinned when it was read, or released. For use from any thread."""

    def __init__(self, pinned: _Pinned, stream: Stream, is_urgent: bool) -> None:
        self.stream = stream
        self.since = time.monotonic()
        self.page = pinned.page
        self._pinned, self._is_urgent = pinned, is_urgent
        self._lock = threading.Lock()
        self._reader: Lane | None = None
        self._is_over = False

    def is_forgotten(self, forgotten_s: float) -> bool:
        """Return whether it is over, or no reader has come for so long."""
        return self._is_over or (self._reader is None and time.monotonic() - self.since > forgotten_s)

    def give(self, lane: Lane) -> None:
        """Give it to the first caller."""
        with self._lock:
            if self._is_over or self._reader is not None:
                return
            self._reader = lane
        if not self._is_urgent:
            step_back()
        try:
            lane.give(self._pinned.parts(writable=lane.by != TCP))
        except OSError:
            pass  # the reader is gone, or was told to go
        finally:
            with self._lock:
                self._reader = None
                self._end()

    def release(self) -> None:
        """Unpin it; its reader gets nothing more."""
        with self._lock:
            if self._reader is None:
                self._end()
            else:
                self._reader.end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._pinned.close()


class SnapshotGiver:
    """Answers callers that have the run's key; each caller reads one snapshot at a time."""

    def __init__(
        self,
        asked: zmq.Socket[bytes],
        host: str,
        directories: Sequence[Path],
        replicas: ReplicaCopies,
        feed: RecordFeed,
        forgotten_s: float = FORGOTTEN_S,
        stalled_s: float = STALLED_S,
        fabric: Fabric | None = None,
    ) -> None:
        """Take the sockets; ``asked``: a ROUTER that listens. ``host``: where readers connect.

        ``directories``: of arenas; ``replicas``: copies that rely on these; ``feed``: the records of this node's
        ranks.
        """
        self._replicas = replicas
        self._feed = feed
        self._forgotten_s, self._stalled_s, self._fabric = forgotten_s, stalled_s, fabric
        self.socket = asked
        self.listener = socket.create_server((host, 0), backlog=_MAX_KEPT)
        self.listener.setblocking(False)
        self._port: int = self.listener.getsockname()[1]
        self._directories = directories
        self._kept: dict[bytes, _Kept] = {}
        self._life = ANY
        # requests for a life that has not begun here, with their times
        self._early: dict[bytes, tuple[Want, float]] = {}
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)

    def serve(self) -> None:
        """Answer every request that is waiting."""
        for frames in wire.receive_all(self.socket):
            if len(frames) != 2:
                continue
            caller, frame = frames
            try:
                message = asking.decode(frame)
            except WireError:
                continue
            if isinstance(message, Want):
                self._want(caller, message)
            elif isinstance(message, WantRecords):
                self._feed.want(caller, message)
            else:
                self._release(caller)

    def accept(self) -> None:
        """Accept one reader, which will say what it wants."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # the caller has left again
        if not self._strangers.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_TOKEN_S)
                token = bytearray(TOKEN_BYTES)
                encrypted_stream.receive_exactly(connection, memoryview(token))
            except OSError:
                return
            finally:
                self._strangers.release()
            for kept in list(self._kept.values()):
                lane = lane_given(connection, bytes(token), kept.stream, self._fabric, self._stalled_s)
                if lane is not None:
                    kept.give(lane)

    def begin(self, life: Life) -> None:
        """From now on, snapshots are of this life."""
        self._life = life
        waiting, self._early = self._early, {}
        for caller, (message, _) in waiting.items():
            self._want(caller, message)

    def tick(self) -> None:
        """Give new records, and drop what is kept for callers that are gone."""
        for caller, records in self._feed.due():
            if not self._say(caller, records):
                self._feed.release(caller)
        now = time.monotonic()
        gone = [caller for caller, kept in self._kept.items() if kept.is_forgotten(self._forgotten_s)]
        gone += [caller for caller, (_, at) in self._early.items() if now - at > self._forgotten_s]
        for caller in gone:
            self._release(caller)

    def _want(self, caller: bytes, message: Want) -> None:
        self._release(caller)
        if message.life > self._life and len(self._early) < _MAX_KEPT:
            # the snapshots here may be of a life that the others have left
            self._early[caller] = (message, time.monotonic())
            return
        pinned = self._pin(message) if message.life <= self._life and len(self._kept) < _MAX_KEPT else None
        if pinned is None:
            self._say(caller, Miss(f"there is no snapshot of step {message.step} of rank {message.rank}"))
            return
        is_urgent = message.life == ANY  # ranks wait for it
        stream = Stream.new(self._port, None if self._fabric is None else self._fabric.new_place())
        kept = self._kept[caller] = _Kept(pinned, stream, is_urgent)
        self._say(caller, Have(message.rank, message.step, kept.page, kept.stream))

    def _pin(self, want: Want) -> _Pinned | None:
        wanted = (want.rank, want.step, want.world_size)
        for snapshot in [held for directory in self._directories for held in arena.scan(directory)]:
            if (snapshot.rank, snapshot.step, snapshot.world_size) != wanted:
                continue
            if want.table or want.ranges:
                return _ranges(snapshot, want)
            file = arena.lock_snapshot(snapshot)
            if file is not None:
                return _PinnedArena(file, snapshot.size_bytes)
        if want.table or want.ranges:
            return None
        with contextlib.suppress(CheckpointError, OSError):
            copy = self._replicas.get(*wanted) or self._lent(*wanted)
            return OpenedCopy(copy) if copy is not None else None
        return None

    def _lent(self, rank: int, step: int, world_size: int) -> ReplicaCopy | None:
        """Return the state of a rank of this node that has no snapshot of its own."""
        for directory in self._directories:
            found = lost_ranks.borrowed(directory, rank, step, world_size)
            if found is not None:
                return borrowed_state.replica(found)
        return None

    def _say(self, caller: bytes, message: Given) -> bool:
        return wire.send(self.socket, [caller, giving.encode(message)])

    def _release(self, caller: bytes) -> None:
        self._feed.release(caller)
        self._early.pop(caller, None)
        kept = self._kept.pop(caller, None)
        if kept is not None:
            kept.release()


def _ranges(snapshot: arena.HeldSnapshot, want: Want) -> _Ranges | None:
    ranges = want.ranges
    if want.table:
        header = arena.read_header(snapshot.path)
        if header is None:
            return None
        ranges = ((header.table_offset, header.table_size),)
    with contextlib.suppress(CheckpointError):
        data = read_ranges(snapshot, ranges)
        return _Ranges(data) if data is not None else None
    return None
