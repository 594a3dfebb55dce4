"""The sending side of the replicator: other nodes read snapshots of this node's memory."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.replication.messages import ANY, TOKEN_BYTES, Have, Life, Miss, Stream, Want, asking, giving
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core import encrypted_stream, wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.core.helper_process import step_back
from resilio_hpc.native import map_shared

FORGOTTEN_S = 30.0
"""A snapshot that no caller has fetched within that time is let go: its reader is gone."""
STALLED_S = 120.0
"""A reader takes memory before it reads, which is long for a large snapshot; for longer it is not waited."""
_TOKEN_S = 5.0
_MAX_KEPT = 64
_MAX_STRANGERS = 256


class _Kept:
    """A pinned snapshot that a caller reads; it is unpinned when it was read, or released. For use from any thread."""

    def __init__(self, fd: int, size: int, port: int, is_urgent: bool, stalled_s: float) -> None:
        self.stream = Stream.new(port)
        self.since = time.monotonic()
        self.header = os.pread(fd, PAGE, 0)
        self._fd, self._size, self._is_urgent, self._stalled_s = fd, size, is_urgent, stalled_s
        self._lock = threading.Lock()
        self._reader: socket.socket | None = None
        self._is_over = False

    def is_forgotten(self, forgotten_s: float) -> bool:
        """Return whether it is over, or no reader has come for so long."""
        return self._is_over or (self._reader is None and time.monotonic() - self.since > forgotten_s)

    def give(self, connection: socket.socket) -> None:
        """Send it to the first caller."""
        with self._lock:
            if self._is_over or self._reader is not None:
                return
            self._reader = connection
        if not self._is_urgent:
            step_back()
        try:
            connection.settimeout(self._stalled_s)
            encrypted_stream.give(connection, self.stream.key, map_shared(self._fd, self._size, False)[PAGE:])
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
                with contextlib.suppress(OSError):
                    self._reader.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            os.close(self._fd)


class SnapshotGiver:
    """Answers callers that have the run's key; each caller reads one snapshot at a time."""

    def __init__(
        self,
        asked: zmq.Socket[bytes],
        host: str,
        directories: Sequence[Path],
        forgotten_s: float = FORGOTTEN_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Take the sockets; ``asked``: a ROUTER that listens. ``host``: where readers connect.

        ``directories``: of arenas.
        """
        self._forgotten_s, self._stalled_s = forgotten_s, stalled_s
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
                if hmac.compare_digest(kept.stream.token, token):
                    kept.give(connection)

    def begin(self, life: Life) -> None:
        """From now on, snapshots are of this life."""
        self._life = life
        waiting, self._early = self._early, {}
        for caller, (message, _) in waiting.items():
            self._want(caller, message)

    def tick(self) -> None:
        """Drop what is kept for callers that are gone."""
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
        is_urgent = message.life == ANY  # ranks wait for it
        wanted = (message.rank, message.step, message.world_size)
        held = [held for directory in self._directories for held in arena.scan(directory)]
        for snapshot in held:
            found = (snapshot.rank, snapshot.step, snapshot.world_size)
            if found == wanted and message.life <= self._life and len(self._kept) < _MAX_KEPT:
                fd = arena.lock_snapshot(snapshot)
                if fd is not None:
                    kept = self._kept[caller] = _Kept(fd, snapshot.size_bytes, self._port, is_urgent, self._stalled_s)
                    self._say(caller, Have(message.rank, message.step, kept.header, kept.stream))
                    return
        self._say(caller, Miss(f"there is no snapshot of step {message.step} of rank {message.rank}"))

    def _say(self, caller: bytes, message: Have | Miss) -> None:
        wire.send(self.socket, [caller, giving.encode(message)])

    def _release(self, caller: bytes) -> None:
        self._early.pop(caller, None)
        kept = self._kept.pop(caller, None)
        if kept is not None:
            kept.release()
