"""The disk server: a process beside the agent that lets other nodes read copies on this node's own disk.

``python -m resilio_hpc.ckpt.tiers.disk_server SOCKET`` accepts connections on an open socket of that number. It reads
one ServeDisk as a JSON line from standard input, and ends with its input or its parent. A caller with the key reads any
number of blocks of the copies of committed shard files (``local_disk``), over its own connection (``disk_messages``).
Each connection has a thread, so a disk that hangs blocks only its own readers. It needs neither torch nor h5py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
from pathlib import Path

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.ckpt.tiers.disk_messages import (
    BUSY,
    MAX_BYTES,
    PIECE_BYTES,
    Copy,
    Read,
    Remove,
    ServeDisk,
    asking,
    decode_serve,
)
from resilio_hpc.core import helper_process
from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.errors import CheckpointError, WireError
from resilio_hpc.core.regular_file import open_direct

READERS = 64
"""Connections that read at a time. Where all nodes want the same file, the shared file system has more to give than one
node."""
_STRANGERS = 256
_STRANGER_S = 5.0
_IDLE_S = 60.0


class DiskGiver:
    """Takes connections until the socket is closed."""

    def __init__(self, listener: socket.socket, serve: ServeDisk, readers: int = READERS) -> None:
        self._listener, self._serve = listener, serve
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._readers = threading.BoundedSemaphore(readers)

    def run(self) -> None:
        """Serve callers that have the key."""
        while True:
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._strangers.release()
                if self._listener.fileno() < 0:
                    return
                continue  # the caller has gone again
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, CheckpointError, WireError):  # the caller is gone, or has no key
            try:
                connection.settimeout(_STRANGER_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sealed = SealedConnection(connection, self._serve.key, calls=False)
                first = asking.decode(sealed.receive())
            finally:
                self._strangers.release()
            connection.settimeout(_IDLE_S)
            if not self._readers.acquire(blocking=False):
                sealed.send(BUSY.encode())
                return
            try:
                with _Reader(self._serve) as reader:
                    while True:
                        reader.answer(sealed, first)
                        first = asking.decode(sealed.receive())
            finally:
                self._readers.release()


class _Reader:
    """One connection: the copy that it asked for last stays open."""

    def __init__(self, serve: ServeDisk) -> None:
        self._local, self._checkpoints = Path(serve.local), Path(serve.checkpoints)
        self._room = memoryview(mmap.mmap(-1, PIECE_BYTES + 2 * PAGE))
        self._copy: Copy | None = None
        self._fd = -1

    def answer(self, sealed: SealedConnection, request: Read | Remove) -> None:
        """Carry out one request. Raises OSError for the connection, and for a disk that fails in the middle."""
        try:
            if isinstance(request, Remove):
                self._path(request.copy).unlink()
                return
            if sum(size for _, size in request.extents) > MAX_BYTES:
                raise CheckpointError(f"more than {MAX_BYTES} bytes in one request")
            self._open(request.copy)
        except (OSError, CheckpointError) as error:
            if isinstance(request, Read):
                sealed.send((str(error) or type(error).__name__).encode()[:1000])
            return
        sealed.send(b"")
        for offset, size in request.extents:
            for at in range(offset, offset + size, PIECE_BYTES):
                sealed.send(self._read(at, min(PIECE_BYTES, offset + size - at)))

    def _path(self, copy: Copy) -> Path:
        path = local_disk.copy_of(self._local, self._checkpoints, copy.step, copy.epoch, copy.round, copy.file)
        if path is None:
            raise CheckpointError(f"there is no copy of {copy.file} of step {copy.step}")
        return path

    def _open(self, copy: Copy) -> None:
        if copy == self._copy:
            return
        self.close()
        self._fd = open_direct(self._path(copy), follow=False)
        if os.fstat(self._fd).st_size != copy.size_bytes:
            raise CheckpointError(f"its copy of {copy.file} of step {copy.step} has another size")
        self._copy = copy

    def _read(self, offset: int, size: int) -> memoryview:
        """Read whole pages, as direct reads must."""
        begin = offset & -PAGE
        length = (offset + size - begin + PAGE - 1) & -PAGE
        done = os.preadv(self._fd, [self._room[:length]], begin)
        if done < offset + size - begin:
            raise OSError("the copy ends too early")
        return self._room[offset - begin : offset - begin + size]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._copy = -1, None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> int:
    """Serve until the input ends."""
    if helper_process.begin("disk_server", is_urgent=True) is None:
        return 0
    listener = socket.socket(fileno=int(sys.argv[1]))
    serve = decode_serve(sys.stdin.buffer.readline())
    threading.Thread(target=DiskGiver(listener, serve).run, daemon=True).start()
    while sys.stdin.buffer.read(1 << 16):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
