"""Bulk data from one node to another, over TCP, each chunk encrypted and authenticated with AES-256-GCM.

A key is never used twice, and a chunk's nonce is its number, so chunks that are changed, dropped or put in another
order do not decrypt. ``give`` and ``take``: one way, a size that both know, with a key that was drawn for it and came
over the run's authenticated wire, whose own cipher takes five times the processor time. ``SealedConnection``: both
ways, any number of times; each side brings 32 random bytes, from which and from a key that both have the keys of this
connection are derived (HKDF, RFC 5869), one for each way.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from resilio_hpc.core.errors import CheckpointError

_CHUNK_BYTES = 1 << 20
_TAG_BYTES = 16
_KEY_BYTES = 32
_LENGTH_BYTES = 4
_HAS_INTO = hasattr(AESGCM, "encrypt_into")  # cryptography 47; before it each chunk is copied once more


def give(connection: socket.socket, key: bytes, views: Sequence[memoryview]) -> None:
    """Send all bytes of ``views``, one after the other.

    Raises OSError; TimeoutError when the other side takes nothing for the socket's timeout.
    """
    cipher = AESGCM(key)
    room = memoryview(bytearray(_CHUNK_BYTES + _TAG_BYTES))
    for number, plain in enumerate(_chunks(views)):
        sealed = room[: len(plain) + _TAG_BYTES]
        _encrypt_into(cipher, number, plain, sealed)
        connection.sendall(sealed)


def _chunks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes in chunks; they are copied only where a chunk is made of several views."""
    room, filled = memoryview(bytearray(_CHUNK_BYTES)), 0
    for view in views:
        at = 0
        while at < len(view):
            if not filled and len(view) - at >= _CHUNK_BYTES:
                yield view[at : at + _CHUNK_BYTES]
                at += _CHUNK_BYTES
                continue
            piece = view[at : at + _CHUNK_BYTES - filled]
            room[filled : filled + len(piece)] = piece
            filled, at = filled + len(piece), at + len(piece)
            if filled == _CHUNK_BYTES:
                yield room
                filled = 0
    if filled:
        yield room[:filled]


def take(connection: socket.socket, key: bytes, memory: memoryview, goes_on: Callable[[], bool]) -> bool:
    """Fill ``memory``; return False when ``goes_on`` ended it early.

    Raises CheckpointError for bytes that do not match what was sent, OSError, TimeoutError.
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
            _decrypt_into(cipher, number, sealed, plain)
        except InvalidTag:
            raise CheckpointError("bytes came that the other node did not send") from None
    return True


class SealedConnection:
    """One end of a connection.

    Methods raise CheckpointError for bytes that the other side did not send, OSError, TimeoutError after the socket's
    timeout, ConnectionError when the other side ends. Not safe for threads.
    """

    def __init__(self, connection: socket.socket, key: bytes, calls: bool) -> None:
        """Agree on keys. ``calls``: this side made the connection.

        The first message proves that the other side has the key.
        """
        mine = secrets.token_bytes(_KEY_BYTES)
        connection.sendall(mine)
        theirs = bytearray(_KEY_BYTES)
        receive_exactly(connection, memoryview(theirs))
        salt = mine + bytes(theirs) if calls else bytes(theirs) + mine
        keys = HKDF(SHA256(), 2 * _KEY_BYTES, salt, b"resilio sealed connection").derive(key)
        ways = AESGCM(keys[:_KEY_BYTES]), AESGCM(keys[_KEY_BYTES:])
        self._out, self._in = ways if calls else ways[::-1]
        self._sent = self._received = 0
        self._connection = connection
        self._room = memoryview(bytearray(_LENGTH_BYTES + _CHUNK_BYTES + _TAG_BYTES))

    def send(self, data: bytes | memoryview) -> None:
        """Send at most 1 MiB."""
        sealed = self._room[: _LENGTH_BYTES + len(data) + _TAG_BYTES]
        sealed[:_LENGTH_BYTES] = (len(data) + _TAG_BYTES).to_bytes(_LENGTH_BYTES, "big")
        _encrypt_into(self._out, self._sent, data, sealed[_LENGTH_BYTES:])
        self._sent += 1
        self._connection.sendall(sealed)

    def receive(self) -> bytes:
        """Return the bytes of one ``send``."""
        sealed = self._sealed()
        plain = bytearray(len(sealed) - _TAG_BYTES)
        self._open(sealed, memoryview(plain))
        return bytes(plain)

    def receive_into(self, memory: memoryview) -> None:
        """Fill memory with data of a known size."""
        sealed = self._sealed()
        if len(sealed) - _TAG_BYTES != len(memory):
            raise CheckpointError(f"{len(sealed) - _TAG_BYTES} bytes came in the place of {len(memory)}")
        self._open(sealed, memory)

    def _sealed(self) -> memoryview:
        length = self._room[:_LENGTH_BYTES]
        receive_exactly(self._connection, length)
        size = int.from_bytes(length, "big")
        if not _TAG_BYTES <= size <= _CHUNK_BYTES + _TAG_BYTES:
            raise CheckpointError(f"a length of {size} bytes came")
        sealed = self._room[:size]
        receive_exactly(self._connection, sealed)
        return sealed

    def _open(self, sealed: memoryview, memory: memoryview) -> None:
        try:
            _decrypt_into(self._in, self._received, sealed, memory)
        except InvalidTag:
            raise CheckpointError("bytes came that the other node did not send") from None
        self._received += 1

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _encrypt_into(cipher: AESGCM, number: int, plain: bytes | memoryview, sealed: memoryview) -> None:
    if _HAS_INTO:
        cipher.encrypt_into(_nonce(number), plain, None, sealed)
    else:
        sealed[:] = cipher.encrypt(_nonce(number), bytes(plain), None)


def _decrypt_into(cipher: AESGCM, number: int, sealed: memoryview, plain: memoryview) -> None:
    """Raise InvalidTag for bytes that the other side did not send."""
    if _HAS_INTO:
        cipher.decrypt_into(_nonce(number), sealed, None, plain)
    else:
        plain[:] = cipher.decrypt(_nonce(number), bytes(sealed), None)


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
