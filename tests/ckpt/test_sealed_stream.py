"""Bytes on a sealed stream: they arrive, or it is an error, whatever becomes of them on the way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from resilio_hpc.core import encrypted_stream
from resilio_hpc.core.errors import CheckpointError

POOL = ThreadPoolExecutor(1)
CHUNK = 1 << 20
SEALED = CHUNK + 16
KEY = bytes(range(32))


def sealed(data: bytes, key: bytes = KEY) -> bytes:
    """What goes over the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = POOL.submit(give_and_close, ours, data, key)
        found = b""
        while piece := theirs.recv(1 << 20):
            found += piece
        sent.result()
    return found


def give_and_close(connection: socket.socket, data: bytes, key: bytes) -> None:
    with connection:
        encrypted_stream.give(connection, key, [memoryview(data)])


def send_and_close(connection: socket.socket, data: bytes) -> None:
    with connection:
        connection.sendall(data)


def taken(stream: bytes, size: int, key: bytes = KEY) -> bytes:
    """What arrives of such bytes."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with theirs:
        sent = POOL.submit(send_and_close, ours, stream)
        into = bytearray(size)
        try:
            assert encrypted_stream.take(theirs, key, memoryview(into), lambda: True)
        finally:
            theirs.close()
            sent.exception()  # it may not have got rid of all
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 4097])
def test_what_is_given_arrives(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    on_the_way = sealed(data)
    assert size < 100 or data[:100] not in on_the_way
    assert taken(on_the_way, size) == data


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the first chunk": lambda s: bytes([s[0] ^ 1]) + s[1:],
    "a bit of the last tag": lambda s: s[:-1] + bytes([s[-1] ^ 128]),
    "chunks exchanged": lambda s: s[SEALED : 2 * SEALED] + s[:SEALED] + s[2 * SEALED :],
    "a chunk twice": lambda s: s[:SEALED] * 2 + s[2 * SEALED :],
    "a chunk left out": lambda s: s[SEALED:] + bytes(SEALED),
    "nothing but zeros": lambda s: bytes(len(s)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_on_the_way_is_found(change: Callable[[bytes], bytes]) -> None:
    data = np.random.default_rng(1).bytes(3 * CHUNK + 5)
    with pytest.raises(CheckpointError, match="did not send"):
        taken(change(sealed(data)), len(data))


def test_what_was_sealed_with_another_key_is_not_taken() -> None:
    with pytest.raises(CheckpointError, match="did not send"):
        taken(sealed(bytes(100), bytes(32)), 100)
    with pytest.raises(CheckpointError, match="no key"):
        taken(sealed(bytes(100)), 100, KEY[:16])


@pytest.mark.parametrize("size", [0, 1, SEALED - 1, SEALED, 2 * SEALED + 20])
def test_what_is_cut_off_is_an_error(size: int) -> None:
    stream = sealed(bytes(2 * CHUNK + 5))
    with pytest.raises(ConnectionError):
        taken(stream[:size], 2 * CHUNK + 5)
