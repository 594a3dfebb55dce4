"""Peers on the network: who replays, who speaks for another, who says what nobody can work with."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir.storage import Storage
from tests.support.waiting import PATIENCE_S, until

KEYS = wire.Keys.derive(b"a" * 64)
HELLO = m.Hello("n1", "i1", 1, "n1:1", "n1", 1)


class Heard:
    """The agent in which a controller could live: notes who speaks to it."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        self.nodes.append(message.node)

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        self.nodes.append(message.node)

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        raise AssertionError("there was no controller")


class Node:
    """A listening node with real sockets."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.outside: zmq.Context[Any] = zmq.Context()
        self.callers: list[zmq.Socket[bytes]] = []
        self.counters = wire.Counters()
        self.gatekeeper = wire.Gatekeeper(self.context, KEYS, self.counters)
        self.heard = Heard()
        self.host = ControllerHost(
            self.context, KEYS, "127.0.0.1", Ledger(folder / "ledger", "w"), storage, self.counters,
            lambda line: None, self.heard, "local-1",
        )  # fmt: skip

    def serve_until(self, done: Callable[[], bool]) -> None:
        def served() -> bool:
            self.gatekeeper.serve()
            self.host.serve()
            self.host.socket.poll(5)
            return done()

        until(served, "what was sent is served", lambda: (self.counters, self.heard.nodes), poll_s=0)

    def call(self, name: bytes, port: int | None = None) -> zmq.Socket[bytes]:
        self.callers.append(wire.call(self.outside, KEYS, f"127.0.0.1:{port or self.host.port}", name))
        return self.callers[-1]

    def close(self) -> None:
        for link in (*self.callers, self.host.socket, self.gatekeeper.socket):
            link.close(0)
        self.outside.destroy(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "run").mkdir()
    storage = Storage(tmp_path / "run", tmp_path / "spool", "local-1")
    node = Node(tmp_path, storage)
    yield node
    storage.close(10.0)
    node.close()


def test_a_connection_speaks_for_its_own_node_only(node: Node) -> None:
    liar, honest = node.call(b"n2/i1/1"), node.call(b"n1/i1/1")
    wire.send(liar, [m.to_controller.encode(HELLO)])
    node.serve_until(lambda: node.counters.dropped == 1)
    assert node.heard.nodes == []
    wire.send(honest, [m.to_controller.encode(HELLO)])
    node.serve_until(lambda: node.heard.nodes == ["n1"])


class Tap:
    """Passes a connection on, and keeps what the caller sent."""

    def __init__(self, port: int) -> None:
        self.sent = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        caller, _ = self._listener.accept()
        with self._listener, caller, socket.create_connection(("127.0.0.1", self._target)) as listener:
            ways = {caller: listener, listener: caller}
            while True:
                for link in select.select(list(ways), [], [])[0]:
                    data = link.recv(65536)
                    if not data:
                        return
                    self.sent += data if link is caller else b""
                    ways[link].sendall(data)

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_a_recorded_conversation_says_nothing_when_it_is_replayed(node: Node) -> None:
    tap = Tap(node.host.port)
    caller = node.call(b"n1/i1/1", tap.port)
    wire.send(caller, [m.to_controller.encode(HELLO)])
    node.serve_until(lambda: node.heard.nodes == ["n1"])
    caller.close(0)
    tap.end()
    with socket.create_connection(("127.0.0.1", node.host.port)) as replay:
        replay.sendall(tap.sent)
        replay.settimeout(0.01)
        node.serve_until(lambda: closed(replay))
    witness = node.call(b"n3/i1/1")  # who comes after it is heard, so the replay was looked at
    wire.send(witness, [m.to_controller.encode(msgspec.structs.replace(HELLO, node="n3"))])
    node.serve_until(lambda: "n3" in node.heard.nodes)
    assert node.heard.nodes == ["n1", "n3"]


def closed(link: socket.socket) -> bool:
    """Whether the other end has hung up; what it says before is of no interest."""
    try:
        return link.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


BEAT = m.Heartbeat("n1", "i1", 1, 0.0, 0)
OUT_OF_BOUNDS: list[m.ToController] = [
    *(msgspec.structs.replace(HELLO, node=name) for name in ("", "n[1-9", "a,b", "n1\n", "../x", "n" * 5000, "-n")),
    *(msgspec.structs.replace(HELLO, prepared=number) for number in (-2, 1 << 48, 1 << 53, (1 << 64) - 1)),
    *(msgspec.structs.replace(HELLO, local_world_size=number) for number in (-1, 1 << 16, 1 << 31)),
    *(msgspec.structs.replace(HELLO, endpoint=where) for where in ("n1", "n1:99999", "n1:1:", "a b:1", "n1:1\n")),
    *(msgspec.structs.replace(BEAT, sent=time) for time in (float("nan"), float("inf"), -1e300)),
    msgspec.structs.replace(BEAT, echo=float("nan")),
    m.StoreOpened("n1", 1, 0, 1 << 16),
]


@pytest.mark.parametrize("message", OUT_OF_BOUNDS, ids=range(len(OUT_OF_BOUNDS)))
def test_what_is_out_of_bounds_is_no_message(message: m.ToController) -> None:
    with pytest.raises(WireError):
        m.to_controller.decode(m.to_controller.encode(message))


@pytest.mark.parametrize("count", ["epoch", "round", "restarts", "without_progress", "losses"])
def test_a_state_from_which_nobody_can_count_on_is_no_message(count: str) -> None:
    state = m.RoundState(1, 0, m.world_of(()), 0, 0, ())
    hello = msgspec.to_builtins(msgspec.structs.replace(HELLO, last=state))
    m.to_controller.decode(bytes([wire.VERSION]) + msgspec.msgpack.encode(hello))
    hello["last"][count] = [["n1", 1 << 48]] if count == "losses" else 1 << 48
    with pytest.raises(WireError, match="out of bounds"):
        m.to_controller.decode(bytes([wire.VERSION]) + msgspec.msgpack.encode(hello))


def test_what_a_node_says_of_its_checkpoint_file_is_a_record_and_nothing_else() -> None:
    words = msgspec.to_builtins(m.StepPersisted("n1", 1, 0, 10, ShardRecord(0, "node-0.h5", 1, "own", ())))
    for record in ({}, {"anything": [1]}, words["record"] | {"size_bytes": -1}, words["record"] | {"file": None}):
        with pytest.raises(WireError):
            m.to_controller.decode(bytes([wire.VERSION]) + msgspec.msgpack.encode(words | {"record": record}))
