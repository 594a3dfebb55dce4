"""Reads copies of committed shard files from the disks of other nodes: a tier before the shared file system.

This node's agent names these disks (``disk_server``). Each block is verified here, like any other. Any failure is an
error of that file's, and the reader goes on with the committed one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment, check_apart, size_of
from resilio_hpc.ckpt.format.manifest import Manifest, ShardRecord
from resilio_hpc.ckpt.tiers.disk_messages import BUSY, PIECE_BYTES, Copy, Read, Remove, asking
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.errors import CheckpointError, WireError
from resilio_hpc.native import crc32c, direct_io

CONNECT_S = 3.0
THREADS = 4
"""Of a process, each with a connection: while one decrypts, another node's disk works for the others."""
_REQUEST_EXTENTS = 1000
_AHEAD = 2  # requests on their way at a time: while one is sent, the disk works on the next


class PeerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of such reads.

    ``silent_s``: without bytes for so long, that node, or its disk, hangs; ``request_bytes``: of one request;
    ``share_bytes``: what a thread reads: several requests, of which the next one is on its way.
    """

    silent_s: float = 10.0
    request_bytes: int = 8 << 20
    share_bytes: int = 64 << 20


LIMITS = PeerLimits()


class _Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that an agent writes for its ranks. ``node``: this one; ``disks``: node → address of its server."""

    key: bytes
    disks: dict[str, str]
    node: str = ""
    limits: PeerLimits = LIMITS


def write_known(path: Path, key: bytes, disks: Mapping[str, str], node: str = "", limits: PeerLimits = LIMITS) -> None:
    """Write the file for the ranks of this node, which alone may read it."""
    write_atomic(path, msgspec.json.encode(_Known(key, dict(disks), node, limits)), durable=False, mode=0o600)


def _read_known(path: Path | None) -> _Known:
    if path is not None:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=_Known)
    return _Known(b"", {})


def this_node(known: Path | None) -> str:
    """Return this node's name for others; "" if unknown."""
    return _read_known(known).node


class Busy(ConnectionError):
    """Raised when so many read there that the shared file system is the better choice."""


class PeerDisks:
    """The other nodes' disks, for one committed step. ``close`` it after the last read."""

    def __init__(self, known: Path | None, manifest: Manifest) -> None:
        """Take ``known``: see ``write_known``; None, or a file that cannot be read, means no disks."""
        self._manifest = manifest
        self._known = _read_known(known)
        self._files: list[PeerFile] = []
        self._pool = ThreadPoolExecutor(THREADS, "resilio-peer")

    def file(self, shard: ShardRecord) -> PeerFile | None:
        """Return the copy of a shard file on the disk that it passed through; nothing is requested yet."""
        endpoint = self._known.disks.get(shard.node) if shard.node else None
        if endpoint is None:
            return None
        manifest = self._manifest
        copy = Copy(manifest.step, manifest.epoch, manifest.round, shard.file, shard.size_bytes)
        self._files.append(PeerFile(shard.node, endpoint, self._known.key, copy, self._pool, self._known.limits))
        return self._files[-1]

    def close(self) -> None:
        """Close the connections to other nodes."""
        self._pool.shutdown()
        for file in self._files:
            file.close()


class PeerFile:
    """One file on another node's disk. Each thread of ``pool`` gets a connection."""

    def __init__(
        self, node: str, endpoint: str, key: bytes, copy: Copy, pool: ThreadPoolExecutor, limits: PeerLimits = LIMITS
    ) -> None:
        self.limits = limits
        self.node, self.copy, self.pool = node, copy, pool
        host, _, port = endpoint.rpartition(":")
        self._address, self._key = (host, int(port)), key
        self._idle: list[SealedConnection] = []
        self._failure: ConnectionError | None = None  # after one, nothing more is requested
        self._lock = threading.Lock()

    def read(self, segments: Sequence[Segment | BoxSegment]) -> list[int]:
        """Do as ``bulk_io.read``. Raises CorruptCheckpoint for segments that overlap, ConnectionError."""
        check_apart(segments)
        extents = [(segment.offset, size_of(segment)) for segment in segments]
        bad: list[int] = []
        room = memoryview(bytearray(max((one.size for one in segments if isinstance(one, BoxSegment)), default=0)))
        with self._connection() as connection:
            for index in self._arriving(connection, extents):
                segment = segments[index]
                target = segment.target if isinstance(segment, Segment) else room[: segment.size]
                _receive(connection, target)
                if crc32c(target) != segment.crc32c:
                    bad.append(index)
                elif isinstance(segment, BoxSegment):
                    direct_io.copy_segments(target, [segment._replace(offset=0)])
        return bad

    def fill(self, memory: memoryview, offset: int) -> None:
        """Read bytes from ``offset`` on, not verified. Raises ConnectionError."""
        with self._connection() as connection:
            for _ in self._arriving(connection, [(offset, len(memory))]):
                _receive(connection, memory)

    def remove(self) -> None:
        """Remove a copy that does not match the commit, so that it is not read again. Raises nothing."""
        with contextlib.suppress(OSError), self._connection() as connection:
            connection.send(asking.encode(Remove(self.copy)))

    def _arriving(self, connection: SealedConnection, extents: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Request all; yield the number of each when it is the next to be received."""
        requests = list(_requests(extents, self.limits.request_bytes))
        sent = 0
        for done, some in enumerate(requests):
            for request in requests[sent : done + _AHEAD]:
                connection.send(asking.encode(Read(self.copy, [extents[number] for number in request])))
                sent += 1
            refusal = connection.receive().decode(errors="replace")
            if refusal:
                raise Busy(refusal) if refusal == BUSY else ConnectionError(refusal)
            yield from some

    @contextlib.contextmanager
    def _connection(self) -> Iterator[SealedConnection]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._call()
            yield connection
        except (TimeoutError, ConnectionError, CheckpointError, WireError) as error:
            if connection is not None:
                connection.close()
            why = _in_words(error, self.limits.silent_s)
            failure = error if isinstance(error, Busy) else ConnectionError(f"{self.node}: {why}")
            self._failure = failure
            raise failure from error
        with self._lock:
            self._idle.append(connection)

    def _call(self) -> SealedConnection:
        connection = socket.create_connection(self._address, CONNECT_S)
        try:
            connection.settimeout(self.limits.silent_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return SealedConnection(connection, self._key, calls=True)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


def _receive(connection: SealedConnection, memory: memoryview) -> None:
    for at in range(0, len(memory), PIECE_BYTES):
        connection.receive_into(memory[at : at + PIECE_BYTES])


def _requests(extents: Sequence[tuple[int, int]], request_bytes: int) -> Iterator[list[int]]:
    """Yield the numbers of the extents of one request."""
    some: list[int] = []
    size = 0
    for number, (_, length) in enumerate(extents):
        if some and (size + length > request_bytes or len(some) == _REQUEST_EXTENTS):
            yield some
            some, size = [], 0
        some.append(number)
        size += length
    if some:
        yield some


def _in_words(error: Exception, silent_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it said nothing for {silent_s:g} s"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it hung up"
    return str(error)
