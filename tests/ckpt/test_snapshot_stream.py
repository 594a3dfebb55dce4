"""Snapshots on their way between nodes: who is slow, stopped, a stranger or an impostor, and who gives up."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.replication.client import SnapshotTaker
from resilio_hpc.ckpt.replication.messages import (
    ANY,
    Fetch,
    Fetched,
    FetchFailed,
    Have,
    Release,
    StillFetching,
    Stream,
    Want,
    asking,
    giving,
)
from resilio_hpc.ckpt.replication.replica_copies import ReplicaCopies
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import encrypted_stream, wire
from tests.support.ckpt.snapshot_node import CHUNK, HOST, KEYS, POOL, Node, node_with, steps, value
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def node() -> Iterator[Node]:
    with node_with() as made:
        yield made


@pytest.mark.parametrize("ranks_wait", [True, False])
def test_snapshots_come_side_by_side_where_ranks_wait(
    node: Node, ranks_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, lock, now, most = encrypted_stream.take, threading.Lock(), 0, 0
    four = threading.Barrier(4)

    def counted(*arguments: object) -> bool:
        nonlocal now, most
        with lock:
            now += 1
            most = max(now, most)
        if ranks_wait:
            four.wait(PATIENCE_S)
        whole = take(*arguments)  # type: ignore[arg-type]
        with lock:
            now -= 1
        return whole

    monkeypatch.setattr(encrypted_stream, "take", counted)
    for rank in range(8):
        node.save(rank, 5)
    arenas, copies = node.root / "new arenas", node.root / "new copies"
    for path in (arenas, copies):
        path.mkdir()
    node.taker = SnapshotTaker(node.context, KEYS, arenas, copies, node.root / "spill", ReplicaCopies())
    node.taker.begin(Fetch(1, 5, list(range(8)), 8, node.endpoint, ANY, ranks_wait, 0, 8 if ranks_wait else 0))
    assert isinstance(node.ends(), Fetched)
    assert [value(arenas if ranks_wait else copies, rank) for rank in range(8)] == [
        rank * 1000 + 5 for rank in range(8)
    ]
    assert most == (4 if ranks_wait else 1)


def test_memory_that_takes_long_to_be_had_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A giver does not forget who calls before it has memory, however long that takes."""
    reserve, calls, go_on = ArenaPair.reserve, threading.Event(), threading.Event()

    def slow(pair: ArenaPair, step: int, size: int) -> object:
        calls.set()
        assert go_on.wait(PATIENCE_S)
        return reserve(pair, step, size)

    with node_with(forgotten_s=PATIENCE_S) as node:
        node.save(0, 5, floats=2_000_000)
        monkeypatch.setattr(ArenaPair, "reserve", slow)
        node.takes(tell_s=0.05)
        node.taker.begin(Fetch(1, 5, [0], 8, node.endpoint))
        node.serve_until(calls.is_set, "it takes memory")
        node.serve_until(lambda: any(kept._reader is not None for kept in node.giver._kept.values()), "it has called")
        node.giver._forgotten_s = 0.0
        node.heard.clear()
        node.serve_until(lambda: len(node.heard) >= 2, "it is said that it goes on")
        assert node.heard[:2] == [StillFetching(1), StillFetching(1)]
        go_on.set()
        assert isinstance(node.ends(), Fetched)
        assert value(node.copies, 0) == 5


def test_what_is_given_up_half_way_never_becomes_whole(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    take, reached, go_on = encrypted_stream.take, threading.Event(), threading.Event()

    def held_up(*arguments: object) -> bool:
        whole = take(*arguments)  # type: ignore[arg-type]
        reached.set()
        assert go_on.wait(PATIENCE_S)
        return whole

    monkeypatch.setattr(encrypted_stream, "take", held_up)
    node.save(0, 5)
    node.taker.begin(Fetch(1, 5, [0], 8, node.endpoint))
    node.serve_until(reached.is_set)
    node.taker.cancel([1])
    node.taker.begin(Fetch(2, 5, [0], 8, node.endpoint))
    assert steps(node.copies) == []
    go_on.set()
    answer = node.ends()
    assert isinstance(answer, Fetched)
    assert answer.number == 2
    assert steps(node.copies) == [(0, 5)]


def test_what_is_given_up_holds_up_nothing_however_silent_its_giver_is(node: Node) -> None:
    path = node.save(0, 5).held(5)
    assert path is not None
    page = path.read_bytes()[:PAGE]
    reached = threading.Event()
    over = threading.Event()
    silent = Impostor(
        node, lambda stream: Have(0, 5, page, stream), lambda c, stream: (reached.set(), over.wait(PATIENCE_S))
    )
    node.takes(silent_s=PATIENCE_S)
    node.taker.begin(Fetch(1, 5, [0], 8, silent.endpoint))
    while not reached.is_set():
        silent.serve()
        node.serve()
    node.taker.cancel([1])
    node.taker.begin(Fetch(2, 5, [0], 8, node.endpoint))
    assert isinstance(node.ends(), Fetched)
    assert not over.is_set()
    assert steps(node.copies) == [(0, 5)]
    over.set()
    silent.close()


def test_no_room_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pair: ArenaPair, step: int, size: int) -> object:
        raise OSError(28, "No space left on device", "/dev/shm")

    node.save(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(ArenaPair, "reserve", full)
        node.taker.begin(Fetch(1, 5, [0], 8, node.endpoint))
        answer = node.ends()
    assert isinstance(answer, FetchFailed)
    assert "No space left on device" in answer.error
    node.taker.begin(Fetch(2, 5, [0], 8, node.endpoint))
    assert isinstance(node.ends(), Fetched)


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), PATIENCE_S)


def said(node: Node, connection: socket.socket) -> bytes:
    """All that comes until the end."""
    found = POOL.submit(lambda: b"".join(iter(lambda: connection.recv(1 << 20), b"")))
    node.serve_until(found.done)
    try:
        return found.result()
    except ConnectionResetError:
        return b""


def test_a_stream_is_given_once_and_to_nobody_else(node: Node) -> None:
    node.save(0, 5)
    have = node.asks(Want(0, 5, 8))
    for token in (b"", bytes(32), have.stream.token[:31] + b"\0", have.stream.token[1:] + b"\0" * 100):
        with connect(have.stream.port) as connection:
            connection.sendall(token)
            connection.shutdown(socket.SHUT_WR)
            assert said(node, connection) == b""
    with connect(have.stream.port) as connection:
        connection.sendall(have.stream.token)
        assert len(said(node, connection)) > 4000
    with connect(have.stream.port) as connection:
        connection.sendall(have.stream.token)
        assert said(node, connection) == b""


def can_be_overwritten(pair: ArenaPair) -> bool:
    """Is step 5, the older one of two, free?"""
    Snapshot(pair, 7, flatten({"w": np.zeros(10)}), POOL).finish()
    return pair.held(5) is None


@pytest.mark.parametrize("ends", ["stalls", "hangs up", "releases", "never comes"])
def test_a_reader_that_is_gone_or_stopped_keeps_nothing(ends: str) -> None:
    """What is handed in short ends it as soon as it was seen that the snapshot is kept."""
    with node_with(stalled_s=1.0 if ends == "stalls" else PATIENCE_S, forgotten_s=PATIENCE_S) as node:
        check_let_go(node, ends)


def check_let_go(node: Node, ends: str) -> None:
    pair = node.save(0, 5, floats=8_000_000)  # more than buffers hold
    Snapshot(pair, 6, flatten({"w": np.zeros(10)}), POOL).finish()
    have = node.asks(Want(0, 5, 8))
    connection = None
    if ends != "never comes":
        connection = connect(have.stream.port)
        connection.sendall(have.stream.token)
        node.serve_until(lambda: bool(select.select([connection], [], [], 0)[0]))
    if ends != "stalls":  # it may have been given up by now
        assert not can_be_overwritten(pair)
    if ends == "never comes":
        node.giver._forgotten_s = 0.0
    if connection is not None and ends == "hangs up":
        connection.close()
    elif ends == "releases":
        node.readers[0].send(asking.encode(Release()))
    node.serve_until(lambda: can_be_overwritten(pair), "it is let go")
    if connection is not None:
        connection.close()


# -- givers that are not what they should be -------------------------------------------------------------------


class Impostor:
    """Gives a snapshot as the test wants it."""

    def __init__(
        self, node: Node, have: Callable[[Stream], Have], act: Callable[[socket.socket, Stream], object]
    ) -> None:
        self.asked, port = wire.listen_anywhere(node.context, KEYS, HOST)
        self.endpoint = f"{HOST}:{port}"
        self._listener = socket.create_server((HOST, 0))
        self._stream = Stream.new(self._listener.getsockname()[1])
        self._have, self._act = have, act
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:
            return  # closed before anybody came
        with connection:
            connection.recv(32, socket.MSG_WAITALL)
            self._act(connection, self._stream)

    def serve(self) -> None:
        """Answer a Want."""
        if self.asked.poll(0):
            caller, _ = self.asked.recv_multipart()
            self.asked.send_multipart([caller, giving.encode(self._have(self._stream))])

    def close(self) -> None:
        self.asked.close(0)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits there
        self._thread.join(PATIENCE_S)
        self._listener.close()


def half(connection: socket.socket, stream: Stream, content: bytes) -> None:
    encrypted_stream.give(connection, stream.key, [memoryview(content)[:CHUNK]])


def garbage(connection: socket.socket, stream: Stream, content: bytes) -> None:
    connection.sendall(bytes(len(content) + 16 * 3))


def silence(connection: socket.socket, stream: Stream, content: bytes) -> None:
    connection.settimeout(PATIENCE_S)
    connection.recv(1)  # until the other one hangs up


@pytest.mark.parametrize(
    ("act", "why"), [(half, "hung up"), (garbage, "did not send"), (silence, "said nothing for 0.3 s")]
)
def test_a_giver_that_fails_half_way_costs_the_fetch_alone(
    node: Node, act: Callable[[socket.socket, Stream, bytes], None], why: str
) -> None:
    node.takes(silent_s=0.3 if act is silence else PATIENCE_S)
    pair = node.save(0, 5, floats=600_000)
    path = pair.held(5)
    assert path is not None
    data = path.read_bytes()
    header = arena.unpack(data[:PAGE])
    assert header is not None
    content = data[PAGE : header.size_bytes]
    impostor = Impostor(node, lambda stream: Have(0, 5, data[:PAGE], stream), lambda c, stream: act(c, stream, content))
    node.taker.begin(Fetch(1, 5, [0], 8, impostor.endpoint))
    while not node.heard or isinstance(node.heard[-1], StillFetching):
        impostor.serve()
        node.serve()
    answer = node.ends()
    assert isinstance(answer, FetchFailed)
    assert why in answer.error
    assert steps(node.copies) == []
    impostor.close()
    node.takes()
    node.taker.begin(Fetch(2, 5, [0], 8, node.endpoint))  # of the right one
    assert isinstance(node.ends(), Fetched)


@pytest.mark.parametrize("header", [b"", bytes(4096), None], ids=["none", "no snapshot", "another rank's"])
def test_a_giver_that_offers_something_else_is_refused(node: Node, header: bytes | None) -> None:
    pair = node.save(1, 5)
    path = pair.held(5)
    assert path is not None
    page = path.read_bytes()[:PAGE] if header is None else header
    impostor = Impostor(node, lambda stream: Have(0, 5, page, stream), lambda c, stream: None)
    node.taker.begin(Fetch(1, 5, [0], 8, impostor.endpoint))
    while not node.heard:
        impostor.serve()
        node.serve()
    assert node.ends() == FetchFailed(1, "another snapshot came than was asked for")
    impostor.close()
