"""How a replicator asks another one for bytes of a snapshot. No call outlasts the moment at which it is given up."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.fabric import Fabric
from resilio_hpc.ckpt.replication.fabric_lane import lane_taken
from resilio_hpc.ckpt.replication.messages import Have, Miss, Release, Want, asking, giving
from resilio_hpc.ckpt.replication.transport import Lane
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core import wire
from resilio_hpc.core.errors import CheckpointError

_LOOK_MS = 100


class SnapshotCaller:
    """Calls one replicator. For use from several threads, each with a socket of its own."""

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: wire.Keys,
        endpoint: str,
        silent_s: float,
        goes_on: Callable[[], bool],
        fabric: Fabric | None = None,
    ) -> None:
        """``goes_on``: whether the fetch has not been given up; once it has turned False, call ``end``."""
        self._context, self._keys, self._endpoint, self._silent_s = context, keys, endpoint, silent_s
        self._goes_on, self._fabric = goes_on, fabric
        self.by: set[str] = set()
        """What moved the bytes so far."""
        self._lock = threading.Lock()
        self._lanes: set[Lane] = set()

    def end(self) -> None:
        """Stop waiting for bytes, after ``goes_on`` has turned False."""
        with self._lock:
            for lane in self._lanes:
                lane.end()

    @contextlib.contextmanager
    def asked(self) -> Iterator[zmq.Socket[bytes]]:
        """Call the other replicator; what it keeps for this caller is let go at the end."""
        name = secrets.token_bytes(8).hex().encode()
        asked = wire.call(self._context, self._keys, self._endpoint, name)
        try:
            yield asked
            wire.send(asked, [asking.encode(Release())])
        finally:
            asked.close(100)

    def ask(self, asked: zmq.Socket[bytes], want: Want) -> Have | None:
        """Return the answer; None: it was given up. Raises CheckpointError, WireError, TimeoutError."""
        wire.send(asked, [asking.encode(want)])
        deadline = time.monotonic() + self._silent_s
        while self._goes_on():
            if asked.poll(_LOOK_MS):
                answer = giving.decode(asked.recv_multipart()[0])
                if isinstance(answer, Have):
                    return answer
                raise CheckpointError(answer.error if isinstance(answer, Miss) else "another answer came than was due")
            if time.monotonic() > deadline:
                raise TimeoutError
        return None

    @contextlib.contextmanager
    def connected(self, have: Have) -> Iterator[Lane | None]:
        """Connect to where the bytes are given; None: it was given up."""
        host = self._endpoint.rpartition(":")[0]
        with contextlib.closing(lane_taken(host, have.stream, self._fabric, self._silent_s)) as lane:
            with self._lock:
                goes_on = self._goes_on()
                if goes_on:
                    self._lanes.add(lane)
            try:
                yield lane if goes_on else None
                self.by.add(lane.by)
            finally:
                with self._lock:
                    self._lanes.discard(lane)

    def bytes_of(self, have: Have, size: int) -> bytes | None:
        """Return the bytes that were asked for; None: it was given up."""
        with self.connected(have) as lane:
            room = bytearray(size)
            whole = lane is not None and lane.take(memoryview(room), self._goes_on)
        return bytes(room) if whole else None


def header_of(have: Have, want: Want) -> Header:
    """Return the header of what came. Raises CheckpointError where that is not what was asked for."""
    header = arena.unpack(have.header)
    if header is None or (header.rank, header.step, header.world_size) != (want.rank, want.step, want.world_size):
        raise CheckpointError("another snapshot came than was asked for")
    return header
