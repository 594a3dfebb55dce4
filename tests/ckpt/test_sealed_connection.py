"""Both ways of a sealed connection: what is sent arrives, and nothing else is believed."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.errors import CheckpointError

KEY = secrets.token_bytes(32)
Pair = Callable[..., tuple[SealedConnection, SealedConnection, socket.socket, socket.socket]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a connection, and what is below them."""
    with ExitStack() as opened:

        def make(key: bytes = KEY) -> tuple[SealedConnection, SealedConnection, socket.socket, socket.socket]:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            made: list[SealedConnection] = []
            thread = threading.Thread(target=lambda: made.append(SealedConnection(theirs, key, calls=False)))
            thread.start()
            first = SealedConnection(ours, KEY, calls=True)
            thread.join()
            return first, made[0], ours, theirs

        yield make


def test_both_ways_of_a_sealed_connection(pair: Pair) -> None:
    one, other, *_ = pair()
    for data in (b"", b"x", secrets.token_bytes(1 << 20)):
        for end, far in ((one, other), (other, one)):
            sender = threading.Thread(target=end.send, args=(data,))
            sender.start()
            assert far.receive() == data
            sender.join()
    one.send(b"four")
    room = bytearray(5)
    with pytest.raises(CheckpointError, match="4 bytes came in the place of 5"):
        other.receive_into(memoryview(room))


def test_what_was_changed_said_twice_or_sent_back_is_not_believed(pair: Pair) -> None:
    one, other, ours, theirs = pair()
    one.send(b"hello")
    heard = theirs.recv(1000)
    ours.sendall(heard[:-1] + bytes([heard[-1] ^ 1]))
    with pytest.raises(CheckpointError):
        other.receive()
    one, other, ours, theirs = pair()
    one.send(b"hello")
    heard = theirs.recv(1000)
    ours.sendall(heard * 2)
    assert other.receive() == b"hello"
    with pytest.raises(CheckpointError):
        other.receive()
    theirs.sendall(heard)
    with pytest.raises(CheckpointError):
        one.receive()
    one, other, ours, theirs = pair(bytes(32))
    one.send(b"hello")
    with pytest.raises(CheckpointError):
        other.receive()
    for length in (0, 15, (1 << 20) + 17, (1 << 32) - 1):
        one, other, ours, theirs = pair()
        ours.sendall(length.to_bytes(4, "big"))
        with pytest.raises(CheckpointError, match=f"a length of {length} bytes"):
            other.receive()
