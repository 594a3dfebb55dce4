"""A lane whose bytes are read from the giver's memory (``fabric``), and which of the two lanes a snapshot takes.

A TCP connection stays beside the reads, encrypted both ways: it brings the offer, tells each side that the other one
lives, and takes over where the fabric fails.
"""

from __future__ import annotations

import hmac
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from resilio_hpc.ckpt.replication.fabric import Fabric, FabricOffer
from resilio_hpc.ckpt.replication.messages import FabricPlace, Stream
from resilio_hpc.ckpt.replication.transport import CONNECT_S, Lane, MemoryPart, TcpLane
from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.errors import CheckpointError

_GOES_ON, _DONE, _TCP = b"", b"done", b"tcp"
_BEAT_S = 1.0
_TURN_S = 0.2
_FABRIC_SHARE = 0.5  # of the patience; what is left is for TCP


def lane_given(connection: socket.socket, token: bytes, stream: Stream, fabric: Fabric | None, patience_s: float) -> (
    Lane | None
):  # fmt: skip
    """Return the lane for a caller that sent ``token``; None: it means another stream."""
    if hmac.compare_digest(stream.token, token):
        return TcpLane(connection, stream, patience_s)
    place = stream.fabric
    if fabric is not None and place is not None and hmac.compare_digest(place.token, token):
        return FabricLane(connection, stream, place, fabric, patience_s)
    return None


def lane_taken(host: str, stream: Stream, fabric: Fabric | None, patience_s: float) -> Lane:
    """Connect to where the other node gives the bytes. Raises OSError."""
    connection = socket.create_connection((host, stream.port), CONNECT_S)
    try:
        if fabric is not None and stream.fabric is not None and fabric.leads_to(stream.fabric):
            connection.sendall(stream.fabric.token)
            return FabricLane(connection, stream, stream.fabric, fabric, patience_s)
        connection.sendall(stream.token)
        return TcpLane(connection, stream, patience_s)
    except BaseException:
        connection.close()
        raise


class _HungUp(ConnectionError):
    """The connection beside the reads is gone, so TCP cannot take over."""


class FabricLane:
    """Reads of the giver's memory, with a TCP connection beside them."""

    def __init__(
        self, connection: socket.socket, stream: Stream, place: FabricPlace, fabric: Fabric, patience_s: float
    ) -> None:
        """``patience_s``: where nothing moves for so long, the other side is gone."""
        self.by = f"libfabric {fabric.provider}"
        self._tcp = TcpLane(connection, stream, patience_s)
        self._connection, self._key = connection, stream.key
        self._place, self._fabric, self._patience_s = place, fabric, patience_s

    def give(self, parts: Sequence[MemoryPart]) -> None:
        """See Lane."""
        control = SealedConnection(self._connection, self._key, calls=False)
        with ExitStack() as until_read:
            try:
                offer = until_read.enter_context(self._fabric.registered(parts, lambda: control.send(_GOES_ON)))
            except OSError as error:
                offer = FabricOffer(error=f"{self._fabric.provider} on the other node: {error}")
                self._fabric.say_once("offer", f"snapshots are given over TCP: {self._fabric.provider}: {error}")
            control.send(msgspec.msgpack.encode(offer))
            word = self._serve(control)
        if word == _TCP:
            self.by = self._tcp.by
            self._tcp.give(parts)

    def _serve(self, control: SealedConnection) -> bytes:
        """Let the other side read until it says how that ended."""
        heard_at = time.monotonic()
        while time.monotonic() - heard_at <= self._patience_s:
            self._fabric.serve()
            if self._is_readable():
                word = control.receive()
                if word != _GOES_ON:
                    return word
                heard_at = time.monotonic()
        raise TimeoutError

    def take(self, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
        """See Lane."""
        control = SealedConnection(self._connection, self._key, calls=True)
        while (data := control.receive()) == _GOES_ON:
            if not goes_on():
                return False
        watched = self._watched(control, goes_on)
        try:
            whole = self._read(_offer(data), memory, watched)
        except _HungUp:
            raise
        except OSError as error:
            why = str(error)
        else:
            if whole:
                control.send(_DONE)
            return whole
        control.send(_TCP)
        self.by = self._tcp.by
        whole = self._tcp.take(memory, goes_on)
        if whole:
            self._fabric.refuse(self._place, why)
        return whole

    def _read(self, offer: FabricOffer, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
        if offer.error:
            raise OSError(offer.error)
        while not self._fabric.turn.acquire(timeout=_TURN_S):
            if not goes_on():
                return False
        try:
            return self._fabric.read(self._place, offer, memory, goes_on, _FABRIC_SHARE * self._patience_s)
        finally:
            self._fabric.turn.release()

    def _watched(self, control: SealedConnection, goes_on: Callable[[], bool]) -> Callable[[], bool]:
        """Return the same question; it also says now and then that this side lives, and sees the other one's end."""
        said_at = time.monotonic()

        def goes() -> bool:
            nonlocal said_at
            if not goes_on():
                return False
            if self._is_readable():  # the giver says nothing meanwhile
                raise _HungUp
            if time.monotonic() - said_at > _BEAT_S:
                said_at = time.monotonic()
                try:
                    control.send(_GOES_ON)
                except OSError as error:
                    raise _HungUp from error
            return True

        return goes

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> None:
        """See Lane."""
        self._tcp.end()

    def close(self) -> None:
        """See Lane."""
        self._tcp.close()


def _offer(data: bytes) -> FabricOffer:
    try:
        return msgspec.msgpack.decode(data, type=FabricOffer)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the other node's offer is not one: {error}") from None
