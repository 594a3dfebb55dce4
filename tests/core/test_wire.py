"""The wire against strangers: real sockets, wrong keys, garbage, floods. A genuine peer goes on undisturbed."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from tests.support.waiting import PATIENCE_S, until


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    number: int
    note: dict[str, Any] = {}


class Pong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    number: int


codec: wire.Codec[Ping | Pong] = wire.Codec(Ping | Pong)
KEYS = wire.Keys.derive(b"a" * 64)
STRANGER = wire.Keys.derive(b"b" * 64)


@dataclass
class Listener:
    """A server as the agents have it: answers every valid message, counts the rest."""

    context: zmq.Context[Any]
    counters: wire.Counters = field(default_factory=wire.Counters)
    heard: list[Ping | Pong] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gatekeeper = wire.Gatekeeper(self.context, KEYS, self.counters)
        self.socket, self.port = wire.listen(self.context, KEYS, "127.0.0.1")

    def serve(self) -> None:
        self.gatekeeper.serve()
        for frames in wire.receive_all(self.socket):
            try:
                message = codec.decode(frames[1]) if len(frames) == 2 else codec.decode(b"")
            except WireError:
                self.counters.dropped += 1
                continue
            self.heard.append(message)
            wire.send(self.socket, [frames[0], codec.encode(Pong(message.number))])

    def serve_until(self, done: Callable[[], bool]) -> None:
        def served() -> bool:
            if done():
                return True
            self.serve()
            self.socket.poll(2)
            return False

        until(served, "what a server does", lambda: f"{self.counters}, {len(self.heard)} heard", poll_s=0.0)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def listener(context: zmq.Context[Any]) -> Listener:
    return Listener(context)


@dataclass
class Outside:
    """Another process: its context and its sockets."""

    context: zmq.Context[Any]
    sockets: list[zmq.Socket[bytes]] = field(default_factory=list)

    def call(self, keys: wire.Keys, port: int, name: bytes) -> zmq.Socket[bytes]:
        self.sockets.append(wire.call(self.context, keys, f"127.0.0.1:{port}", name))
        return self.sockets[-1]


@pytest.fixture
def outside() -> Iterator[Outside]:
    made = Outside(zmq.Context())
    yield made
    made.context.destroy(linger=0)


def genuine_works(listener: Listener, outside: Outside, name: bytes = b"genuine", port: int | None = None) -> None:
    caller = outside.call(KEYS, port or listener.port, name)
    wire.send(caller, [codec.encode(Ping(42))])
    listener.serve_until(lambda: caller.poll(0) != 0)
    assert codec.decode(caller.recv_multipart()[-1]) == Pong(42)


def test_who_has_the_secret_is_answered(listener: Listener, outside: Outside) -> None:
    genuine_works(listener, outside)
    assert listener.counters == wire.Counters(0, 0)


def test_keys_come_from_the_secret_alone() -> None:
    assert wire.Keys.derive(b"a" * 64 + b"\n") == KEYS
    assert len({*vars(KEYS).values(), *vars(STRANGER).values()}) == 10
    assert KEYS.port in wire.PORTS
    with pytest.raises(WireError, match="shorter than 32"):
        wire.Keys.derive(b"short")


def test_wrong_caller_key_gets_nothing(listener: Listener, outside: Outside) -> None:
    mixed = wire.Keys(KEYS.listener_public, KEYS.listener_secret, STRANGER.caller_public, STRANGER.caller_secret)
    caller = outside.call(mixed, listener.port, b"n1")
    wire.send(caller, [codec.encode(Ping(1))])
    listener.serve_until(lambda: listener.counters.refused > 0)
    genuine_works(listener, outside)
    assert caller.poll(0) == 0
    assert listener.heard == [Ping(42)]


def test_wrong_server_key_gets_nothing(listener: Listener, outside: Outside) -> None:
    caller = outside.call(STRANGER, listener.port, b"n1")
    wire.send(caller, [codec.encode(Ping(1))])
    genuine_works(listener, outside)
    assert caller.poll(50) == 0
    assert listener.heard == [Ping(42)]


def test_a_peer_without_curve_gets_nothing(listener: Listener, outside: Outside) -> None:
    for kind in (zmq.DEALER, zmq.REQ, zmq.ROUTER, zmq.PUB):
        plain: zmq.Socket[bytes] = outside.context.socket(kind)
        outside.sockets.append(plain)
        plain.linger = 0
        plain.connect(f"tcp://127.0.0.1:{listener.port}")
        try:
            plain.send(codec.encode(Ping(1)), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
    genuine_works(listener, outside)
    assert listener.heard == [Ping(42)]


def test_raw_bytes_on_the_port_get_at_most_a_greeting(listener: Listener, outside: Outside) -> None:
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\xff" + b"\x00" * 8 + b"\x7f" + b"\x03" * 90):
        with socket.create_connection(("127.0.0.1", listener.port), timeout=2.0) as raw:
            raw.sendall(noise)
            raw.settimeout(0.05)
            try:
                answer = raw.recv(4096)
            except (TimeoutError, ConnectionError):
                answer = b""
            assert len(answer) <= 64  # ZMTP's greeting, which says nothing of us
    genuine_works(listener, outside)


def nested(depth: int) -> bytes:
    return bytes([wire.VERSION]) + b"\x91" * depth + b"\xc0"


GARBAGE = {
    "empty": b"",
    "only a version": bytes([wire.VERSION]),
    "random": bytes([wire.VERSION]) + bytes(range(256)),
    "an older version": bytes([wire.VERSION - 1]) + codec.encode(Ping(1))[1:],
    "a newer version": bytes([wire.VERSION + 1]) + codec.encode(Ping(1))[1:],
    "an unknown type": bytes([wire.VERSION]) + msgspec.msgpack.encode({"type": "Exec", "number": 1}),
    "an unknown field": bytes([wire.VERSION]) + msgspec.msgpack.encode({"type": "Ping", "number": 1, "extra": 2}),
    "text that is no UTF-8": bytes([wire.VERSION]) + b"\x82\xa4type\xa4Ping\xa6num\xff\xfer\x01",
    "a name that is no UTF-8": bytes([wire.VERSION]) + b"\x82\xa4type\xa4P\xff\xfe\xfd\xa6number\x01",
    "a wrong type": bytes([wire.VERSION]) + msgspec.msgpack.encode({"type": "Ping", "number": "one"}),
    "a missing field": bytes([wire.VERSION]) + msgspec.msgpack.encode({"type": "Ping"}),
    "a recursion bomb": nested(100_000),
    "a bomb inside": bytes([wire.VERSION])
    + b"\x83\xa4type\xa4Ping\xa6number\x01\xa4note\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "a length that lies": bytes([wire.VERSION]) + b"\xdf\xff\xff\xff\xff",
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}  # fmt: skip


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_message_is_refused(what: str) -> None:
    with pytest.raises(WireError):
        codec.decode(GARBAGE[what])


def test_garbage_from_a_peer_with_the_secret_is_counted_and_dropped(listener: Listener, outside: Outside) -> None:
    caller = outside.call(KEYS, listener.port, b"garbage")
    for frame in GARBAGE.values():
        assert wire.send(caller, [frame])
    wire.send(caller, [codec.encode(Ping(1)), codec.encode(Ping(2))])  # one frame too many
    listener.serve_until(lambda: listener.counters.dropped == len(GARBAGE) + 1)
    assert caller.poll(0) == 0
    genuine_works(listener, outside)
    assert listener.heard == [Ping(42)]


def test_an_oversized_message_never_arrives(listener: Listener, outside: Outside) -> None:
    with pytest.raises(WireError, match="exceeds"):
        codec.encode(Ping(1, {"x": "y" * wire.MAX_BYTES}))
    caller = outside.call(KEYS, listener.port, b"large")
    wire.send(caller, [b"x" * (wire.MAX_BYTES_HEARD + 1)])
    genuine_works(listener, outside)
    assert listener.heard == [Ping(42)]
    assert listener.counters.dropped == 0


class Unsendable(msgspec.Struct, frozen=True, tag=True):
    content: Any


def deep(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.parametrize("content", [1 << 64, deep(100_000), object()], ids=["a huge number", "deep", "an object"])
def test_what_cannot_be_said_is_refused_at_once(content: Any) -> None:
    with pytest.raises(WireError, match="cannot be a message"):
        wire.Codec[Any](Unsendable).encode(Unsendable(content))


def test_listeners_of_a_run_have_the_same_port_where_it_is_free(context: zmq.Context[Any]) -> None:
    keys = wire.Keys.derive(secrets.token_hex(32).encode())
    first, port = wire.listen(context, keys, "127.0.0.1")
    second, other = wire.listen(context, keys, "127.0.0.1")
    assert port == keys.port
    assert other != keys.port
    first.close(0)
    second.close(0)


def test_a_flood_does_not_starve_a_genuine_peer(listener: Listener, outside: Outside) -> None:
    flood = outside.call(KEYS, listener.port, b"flood")
    listener.serve_until(lambda: bool(flood.poll(0, zmq.POLLOUT)))
    sent = sum(wire.send(flood, [b"garbage"]) for _ in range(20_000))
    assert sent >= 1000
    genuine_works(listener, outside)
    listener.serve_until(lambda: listener.counters.dropped > 0)  # the genuine peer may be first
    assert len(list(wire.receive_all(listener.socket))) <= wire.MAX_PER_READ


def test_a_returning_peer_takes_over_its_name(listener: Listener, outside: Outside) -> None:
    """Though its connection before looks open still: after a cut no end of it comes."""
    with cable(listener.port) as port:
        genuine_works(listener, outside, b"n1", port)
        outside.sockets[-1].close(0)
        genuine_works(listener, outside, b"n1")


@contextmanager
def cable(port: int) -> Iterator[int]:
    """A port from which one connection is led to ``port``, where it stays open though its caller goes away."""

    def lead(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            with suppress(OSError):
                target.sendall(data)

    def join() -> None:
        near, _ = entrance.accept()
        entrance.close()  # its caller does not come again
        with near:
            back = threading.Thread(target=lead, args=(far, near))
            back.start()
            lead(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as entrance, socket.create_connection(("127.0.0.1", port)) as far:
        joined = threading.Thread(target=join)
        joined.start()
        yield entrance.getsockname()[1]
        far.shutdown(socket.SHUT_RDWR)
        joined.join(PATIENCE_S)


def test_sending_to_nobody_does_not_block(outside: Outside) -> None:
    caller = outside.call(KEYS, 1, b"n1")
    sent = [wire.send(caller, [b"x"]) for _ in range(3000)]
    assert sent[-1] is False
