"""Bulk data from one node to another, over TCP, each chunk encrypted and authenticated with AES-256-GCM.

Giver and taker have agreed on a key over the run's authenticated wire, whose own cipher takes five times the
processor time. It is drawn anew for each stream and never used twice; a chunk's nonce is its number, so chunks
that are changed, dropped or put in another order do not decrypt. The total size is known to both sides.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from resilio_hpc.core.errors import CheckpointError

_CHUNK_BYTES = 1 << 20
_TAG_BYTES = 16
_KEY_BYTES = 32


def give(connection: socket.socket, key: bytes, memory: memoryview) -> None:
    """Send all of ``memory``. Raises OSError; TimeoutError when nothing is taken for the socket's timeout."""
    cipher = AESGCM(key)
    room = memoryview(bytearray(_CHUNK_BYTES + _TAG_BYTES))
    for number, at in enumerate(range(0, len(memory), _CHUNK_BYTES)):
        plain = memory[at : at + _CHUNK_BYTES]
        sealed = room[: len(plain) + _TAG_BYTES]
        cipher.encrypt_into(_nonce(number), plain, None, sealed)
        connection.sendall(sealed)


def take(connection: socket.socket, key: bytes, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
    """Fill ``memory``; False when it did not go on to the end.

    Raises CheckpointError for bytes that are not what was given, OSError, TimeoutError.
    """
    if len(key) != _KEY_BYTES:
        raise CheckpointError("the other node gave no key")
    cipher = AESGCM(key)
    room = memoryview(bytearray(_CHUNK_BYTES + _TAG_BYTES))
    for number, at in enumerate(range(0, len(memory), _CHUNK_BYTES)):
        plain = memory[at : at + _CHUNK_BYTES]
        sealed = room[: len(plain) + _TAG_BYTES]
        receive_exactly(connection, sealed)
        if not goes_on():
            return False
        try:
            cipher.decrypt_into(_nonce(number), sealed, None, plain)
        except InvalidTag:
            raise CheckpointError("bytes came that the other node did not send") from None
    return True


def receive_exactly(connection: socket.socket, room: memoryview) -> None:
    """Fill ``room``. Raises ConnectionError when the other side ends before, OSError, TimeoutError."""
    filled = 0
    while filled < len(room):
        received = connection.recv_into(room[filled:])
        if not received:
            raise ConnectionError("the connection ended too early")
        filled += received


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
