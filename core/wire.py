"""Authenticated, encrypted messages between the nodes of a run: ZeroMQ with CURVE, keys derived from the run's secret.

Only a peer that knows the secret gets an answer, others none, not even an error. A message is a msgpack-encoded
``msgspec`` struct behind a one-byte protocol version; it is data, never code, and bounded in size. What cannot be
decoded is counted and dropped by the caller (``Counters``), so a hostile peer costs a log line and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from resilio_hpc.core.errors import WireError
from resilio_hpc.core.struct_codec import Message, StructCodec

VERSION = 3
MAX_BYTES = 16 * 1024 * 1024  # the records of one checkpoint of 4,000 nodes take 5 MiB
MAX_BYTES_HEARD = 1024 * 1024  # of a listener's messages, since many callers may fill its memory
MAX_PER_READ = 256
MAX_UNSENT = 1000
MAX_UNREAD = 10_000
MAX_UNREAD_HEARD = 256  # messages of one caller; further ones wait on its side
BACKLOG = 4096  # all agents of a job connect at once; TCP repeats only after a second what does not fit
PORTS = range(20000, 30000)  # below the ports that the kernel gives to outgoing connections
_AT_ONCE, _AT_ONCE_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # an operation on zmq's enums takes 3 us
ZAP_ADDRESS = "inproc://zeromq.zap.01"


def new_secret() -> bytes:
    """Return a fresh secret for a run: 32 random bytes as hexadecimal text, to be kept in a file of mode 0600."""
    return secrets.token_hex(32).encode()


@dataclass(frozen=True)
class Keys:
    """The two CURVE key pairs of a run (Z85 text), derived from its secret, so no key is ever exchanged.

    ``port``: the port of a listener, if it is free. It is the same on all nodes, so that lists of addresses stay short.
    """

    listener_public: bytes
    listener_secret: bytes
    caller_public: bytes
    caller_secret: bytes
    port: int = 0

    @classmethod
    def derive(cls, secret: bytes) -> Keys:
        """Derive both pairs with HMAC-SHA256 over a label each. Raises WireError for a secret that is too short."""
        if len(secret.strip()) < 32:
            raise WireError("the run's secret is shorter than 32 characters: remove the run directory's 'secret' file")

        def derived(label: bytes) -> bytes:
            return hmac.new(secret.strip(), label, hashlib.sha256).digest()

        def pair(label: bytes) -> tuple[bytes, bytes]:
            private = z85.encode(derived(label))
            return zmq.curve_public(private), private

        port = PORTS.start + int.from_bytes(derived(b"resilio port")[:4], "big") % len(PORTS)
        return cls(*pair(b"resilio listener"), *pair(b"resilio caller"), port)


@dataclass
class Counters:
    """Counts refusals: connections without the secret, and messages that could not be decoded."""

    refused: int = 0
    dropped: int = 0


class Codec(StructCodec[Message]):
    """Encodes and decodes one union of message structs: msgpack behind the protocol's version."""

    def __init__(self, union: Any) -> None:
        super().__init__(union, "a message of this protocol version", MAX_BYTES, msgspec.msgpack, bytes([VERSION]))


class Gatekeeper:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27): only callers with the run's own key come in."""

    def __init__(self, context: zmq.Context[Any], keys: Keys, counters: Counters) -> None:
        self._allowed = z85.decode(keys.caller_public)
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def serve(self) -> None:
        """Answer every request that is waiting; never blocks."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            version, request = (frames[0], frames[1]) if len(frames) > 1 else (b"1.0", b"")
            genuine = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], self._allowed)
            if not genuine:
                self._counters.refused += 1
            code, text = (b"200", b"OK") if genuine else (b"400", b"refused")
            self.socket.send_multipart([version, request, code, text, b"member" if genuine else b"", b""])


def listen(context: zmq.Context[Any], keys: Keys, host: str) -> tuple[zmq.Socket[bytes], int]:
    """Return a ROUTER socket on ``keys.port`` of ``host``, or, where that is taken, on another.

    Returns (socket, port).
    """
    socket = _listener(context, keys)
    try:
        socket.bind(f"tcp://{host}:{keys.port}")
    except zmq.ZMQError:
        return socket, socket.bind_to_random_port(f"tcp://{host}")
    return socket, keys.port


def listen_anywhere(context: zmq.Context[Any], keys: Keys, host: str) -> tuple[zmq.Socket[bytes], int]:
    """Return a ROUTER socket on any free port of ``host``, and the port."""
    socket = _listener(context, keys)
    return socket, socket.bind_to_random_port(f"tcp://{host}")


def _listener(context: zmq.Context[Any], keys: Keys) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _bound(socket, MAX_BYTES_HEARD, MAX_UNREAD_HEARD)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    # a caller that connects again is heard, though the end of its last connection was never seen
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.curve_server = True
    socket.curve_secretkey = keys.listener_secret
    socket.curve_publickey = keys.listener_public
    return socket


def call(context: zmq.Context[Any], keys: Keys, endpoint: str, name: bytes) -> zmq.Socket[bytes]:
    """Return a DEALER socket connected to ``endpoint`` ("host:port"), known there as ``name``."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _bound(socket, MAX_BYTES, MAX_UNREAD)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.curve_serverkey = keys.listener_public
    socket.curve_secretkey = keys.caller_secret
    socket.curve_publickey = keys.caller_public
    socket.connect(f"tcp://{endpoint}")
    return socket


def _bound(socket: zmq.Socket[bytes], message_bytes: int, unread: int) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    socket.setsockopt(zmq.RCVHWM, unread)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 15_000)  # thousands of handshakes at once take seconds on a busy node


def receive_all(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield messages waiting on a socket, at most MAX_PER_READ, so that a flood cannot starve the reader's loop."""
    for _ in range(MAX_PER_READ):
        try:
            # a Frame says whether more follow; recv_multipart asks for it each time
            frame = socket.recv(_AT_ONCE, copy=False)
            frames = [frame.bytes]
            while frame.more:
                frame = socket.recv(_AT_ONCE, copy=False)
                frames.append(frame.bytes)
        except zmq.Again:
            return
        yield frames


def send(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    """Send without blocking; return False when the peer is gone or its queue is full (the sender tries again later)."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _AT_ONCE_MORE)
        socket.send(frames[-1], _AT_ONCE)
    except (zmq.Again, zmq.ZMQError):
        return False
    return True
