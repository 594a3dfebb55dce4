"""The agent's end of the rank link: what cannot be understood closes its own connection and no other."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core import rank_link
from resilio_hpc.core.rank_link import Attach, RankMessage, StepDone, StopAt
from resilio_hpc.launch.workers.rank_server import RankServer

Heard = list[tuple[int, int, RankMessage]]


@pytest.fixture
def heard() -> Heard:
    return []


@pytest.fixture
def server(tmp_path: Path, heard: Heard) -> Iterator[RankServer]:
    made = RankServer(tmp_path / "agent.sock", lambda *words: heard.append(words))
    yield made
    made.close()
    assert not made.path.exists()


@pytest.fixture
def connect(server: RankServer) -> Iterator[list[socket.socket]]:
    links = []
    for _ in range(2):
        link = rank_link.connect({"RESILIO_AGENT_SOCKET": str(server.path)})
        assert link is not None
        link.settimeout(2.0)
        links.append(link)
    serve(server)
    yield links
    for link in links:
        link.close()


def serve(server: RankServer) -> None:
    for _ in range(3):
        for fileno in list(server.filenos()):
            server.serve(fileno)


def attach(rank: int, round_number: int = 0) -> bytes:
    return rank_link.to_agent.encode(Attach(rank, rank, round_number, 1))


def test_the_socket_is_private(server: RankServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


BAD = {
    "garbage": b"\x00\xff not json",
    "no Attach": rank_link.to_agent.encode(StepDone(1, 0.0)),
    "unknown type": b'{"type":"Exec","command":"id"}',
    "unknown field": b'{"type":"StepDone","step":1,"time":0,"more":1}',
    "an agent's word": rank_link.to_rank.encode(StopAt(3)),
    "deep": b"[" * 60_000,
    "oversized": b'{"type":"RestoreFailed","step":1,"source":"memory","error":"' + b"x" * rank_link.MAX_BYTES + b'"}',
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_understood_closes_that_connection_only(
    what: str, server: RankServer, connect: list[socket.socket], heard: Heard
) -> None:
    bad, good = connect
    good.send(attach(1))
    bad.send(BAD[what])
    serve(server)
    assert server.dropped == 1
    assert bad.recv(100) == b""
    good.send(rank_link.to_agent.encode(StepDone(5, 1.0)))
    serve(server)
    assert heard == [(0, 1, Attach(1, 1, 0, 1)), (0, 1, StepDone(5, 1.0))]


def test_words_go_to_the_rank_of_the_round_that_they_are_for(server: RankServer, connect: list[socket.socket]) -> None:
    old, new = connect
    old.send(attach(0, 3))
    new.send(attach(0, 4))
    serve(server)
    server.tell(4, 0, StopAt(9))
    server.tell(4, 1, StopAt(8))
    assert rank_link.to_rank.decode(new.recv(1000)) == StopAt(9)
    old.settimeout(0.05)
    with pytest.raises(TimeoutError):
        old.recv(1000)


def test_a_rank_that_does_not_read_is_not_waited_for(server: RankServer, connect: list[socket.socket]) -> None:
    connect[0].send(attach(0))
    serve(server)
    for step in range(5000):
        server.tell(0, 0, StopAt(step))
    assert server.dropped > 0


def test_a_flood_is_read_in_portions(server: RankServer, connect: list[socket.socket], heard: Heard) -> None:
    flood = connect[0]
    flood.send(attach(0))
    flood.setblocking(False)
    sent = 0
    try:
        while sent < 1000:
            flood.send(rank_link.to_agent.encode(StepDone(sent, 0.0)))
            sent += 1
    except BlockingIOError:
        pass
    for fileno in list(server.filenos()):
        server.serve(fileno)
    assert len(heard) <= 64


def test_last_words_are_heard_before_the_end(server: RankServer, connect: list[socket.socket], heard: Heard) -> None:
    link = connect[0]
    link.send(attach(0))
    serve(server)
    link.send(rank_link.to_agent.encode(rank_link.Finished(7)))
    link.close()
    server.drain(0)
    assert heard[-1] == (0, 0, rank_link.Finished(7))
