"""How a snapshot's bytes go from one node to another: one interface, and TCP as its first implementation.

What is said of a snapshot goes over the run's wire (``messages``). ``Have.stream`` says where its bytes are given.
Both sides then have a lane. It moves bytes and knows nothing of snapshots; what arrives is verified block by block when
it is restored, whatever brought it. The other implementation is ``fabric_lane``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from resilio_hpc.ckpt.replication.messages import TCP, Stream
from resilio_hpc.core import encrypted_stream

CONNECT_S = 3.0
"""For a node that has answered just before."""


class MemoryPart(NamedTuple):
    """Bytes to be given: ``size`` of a mapped file or buffer, from ``offset`` on."""

    memory: memoryview
    offset: int
    size: int

    @property
    def view(self) -> memoryview:
        """Return the bytes."""
        return self.memory[self.offset : self.offset + self.size]


class Lane(Protocol):
    """One way for the bytes of one snapshot."""

    by: str
    """What moved the bytes: ``tcp``, or ``libfabric`` with its provider."""

    def give(self, parts: Sequence[MemoryPart]) -> None:
        """Give all bytes, one part after the other. Raises OSError; TimeoutError where the other side takes nothing."""

    def take(self, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
        """Fill memory; return False when ``goes_on`` ended it early.

        Raises CheckpointError for bytes that the other side did not send, OSError, TimeoutError.
        """

    def end(self) -> None:
        """End what waits in ``give`` or ``take``. From any thread."""

    def close(self) -> None:
        """Close it, once no other thread uses it."""


class TcpLane:
    """A TCP connection, each chunk encrypted with a key that came over the run's wire."""

    def __init__(self, connection: socket.socket, stream: Stream, patience_s: float) -> None:
        """``patience_s``: where nothing moves for so long, the other side is gone."""
        connection.settimeout(patience_s)
        self.by = TCP
        self._connection, self._key = connection, stream.key

    def give(self, parts: Sequence[MemoryPart]) -> None:
        """See Lane."""
        encrypted_stream.give(self._connection, self._key, [part.view for part in parts])

    def take(self, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
        """See Lane."""
        return encrypted_stream.take(self._connection, self._key, memory, goes_on)

    def end(self) -> None:
        """See Lane."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See Lane."""
        self._connection.close()
