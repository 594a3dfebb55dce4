"""Snapshots read from another node's memory by libfabric, over its providers that need no hardware."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from resilio_hpc.ckpt.replication.fabric import (
    HARDWARE,
    Fabric,
    FabricOffer,
    has_devices,
    open_fabric,
    provider_for,
)
from resilio_hpc.ckpt.replication.fabric_lane import FabricLane, lane_given, lane_taken
from resilio_hpc.ckpt.replication.messages import Stream
from resilio_hpc.ckpt.replication.transport import MemoryPart, TcpLane
from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.errors import CheckpointError
from tests.support.ckpt.fabric_pair import HOST, FabricPair, fabric_pair, quietly, silent_place, software
from tests.support.requirements import need_fabric

DATA = random.Random(3).randbytes(5_000_003)
WHOLE = [MemoryPart(memoryview(DATA), 0, len(DATA))]
OFFER = FabricOffer(((1, 0),), ((0, 0, len(DATA)),))


@pytest.fixture(params=[0, 1], ids=["TCP", "sockets"])
def pair(request: pytest.FixtureRequest) -> Iterator[FabricPair]:
    need_fabric(providers=request.param + 1)
    with fabric_pair(software()[request.param]) as made:
        yield made


@pytest.mark.parametrize(
    "places",
    [
        [(0, len(DATA))],
        [(0, 0)],
        [(1, 1)],
        [(4095, 3_000_001), (0, 17), (0, 0), (1 << 20, 1 << 20), (4_999_999, 4)],  # also across windows of 1 MiB
        [(number * 4096, 100) for number in range(1000)],
    ],
    ids=["one part", "no bytes", "one byte", "several parts", "many parts"],
)
def test_what_is_read_is_what_was_offered(pair: FabricPair, places: list[tuple[int, int]]) -> None:
    one, other = memoryview(DATA), memoryview(bytes(reversed(DATA)))
    parts = [MemoryPart(one, *place) for place in places] + [MemoryPart(other, 3, 70_001)]
    expected = b"".join(part.view for part in parts)
    into = bytearray(len(expected) + 2)  # what lies around it is not touched
    assert pair.transfer(parts, memoryview(into)[1:-1]) == (True, pair.by)
    assert into[1:-1] == expected
    assert (into[0], into[-1]) == (0, 0)
    assert pair.said == []


def test_two_transfers_at_once_take_turns(pair: FabricPair) -> None:
    found: list[tuple[bool, str, bool]] = []

    def one(number: int) -> None:
        into = bytearray(len(DATA))
        found.append((*pair.transfer(WHOLE, memoryview(into)), into == DATA))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(True, pair.by, True)] * 4


def test_one_that_is_given_up_ends_and_the_next_one_works(pair: FabricPair) -> None:
    asked = 0

    def goes_on() -> bool:
        nonlocal asked
        asked += 1
        return asked < 3

    into = bytearray(len(DATA))
    assert pair.transfer(WHOLE, memoryview(into), goes_on) == (False, pair.by)
    seen = bytes(into)
    assert pair.transfer(WHOLE, memoryview(again := bytearray(len(DATA))))[0]
    assert again == DATA
    assert into == seen  # no read that was under way wrote later


@pytest.mark.parametrize("which", ["giver", "taker"])
def test_another_thread_ends_it(pair: FabricPair, which: str) -> None:
    with silent_place(pair) as place, pair.lanes(place=place) as (gives, takes):
        offers = threading.Thread(target=lambda: quietly(lambda: offered_by_hand(gives, OFFER)))
        ends = threading.Timer(0.1, (gives if which == "giver" else takes).end)
        for thread in (offers, ends):
            thread.start()
        with pytest.raises(ConnectionError):
            takes.take(memoryview(bytearray(len(DATA))), lambda: True)
        for thread in (offers, ends):
            thread.join()


def offered_by_hand(gives: FabricLane, offer: FabricOffer) -> None:
    """A giver that offers this, and sends the bytes if it is asked to."""
    control = SealedConnection(gives._connection, gives._key, calls=False)
    control.send(msgspec.msgpack.encode(offer))
    while not gives._is_readable():
        gives._fabric.serve()
    while (word := control.receive()) == b"":
        pass
    assert word == b"tcp"
    gives._tcp.give(WHOLE)


@pytest.mark.parametrize("what", ["a wrong key", "a silent giver", "no way", "an offer of nothing"])
def test_where_the_fabric_fails_the_bytes_come_over_tcp_and_it_is_said_once(pair: FabricPair, what: str) -> None:
    with ExitStack() as stack:
        offer, place = OFFER, pair.giver.new_place()
        if what == "a wrong key":
            made = stack.enter_context(pair.giver.registered(WHOLE, lambda: None))
            offer = msgspec.structs.replace(made, regions=tuple((key ^ 1, base) for key, base in made.regions))
        elif what == "an offer of nothing":
            offer = FabricOffer(error="Cannot allocate memory")
        else:
            with ExitStack() as listens:
                place = listens.enter_context(silent_place(pair))
                if what == "a silent giver":
                    stack.push(listens.pop_all())
        for _ in range(2):
            with pair.lanes(patience_s=2.0, place=place) as (gives, takes):
                offers = threading.Thread(target=offered_by_hand, args=(gives, offer))
                offers.start()
                into = bytearray(len(DATA))
                assert takes.take(memoryview(into), lambda: True)
                offers.join()
            assert into == DATA
            assert takes.by == "tcp"
    assert len(pair.said) == 1
    assert pair.said[0].startswith(f"copies of snapshots go over TCP, since {pair.giver.provider} failed: ")
    assert not pair.taker.leads_to(place)
    with fabric_pair(pair.giver.provider) as other:  # another node's
        assert pair.taker.leads_to(other.giver.new_place())


@pytest.mark.parametrize("what", ["many pieces", "many regions"])
def test_memory_that_cannot_be_registered_goes_over_tcp(pair: FabricPair, what: str) -> None:
    one, count = memoryview(DATA), 50_001 if what == "many pieces" else 5_000
    parts = [MemoryPart(one if what == "many pieces" else memoryview(DATA), number, 1) for number in range(count)]
    into = bytearray(count)
    for _ in range(2):
        assert pair.transfer(parts, memoryview(into)) == (True, "tcp")
        assert into == DATA[:count]
    why = "the snapshot is in 50001 pieces" if what == "many pieces" else "too many regions: Cannot allocate memory"
    assert pair.said[0].startswith(f"snapshots are given over TCP: {pair.giver.provider}: ")
    assert why in pair.said[0]
    assert len(pair.said) == 2  # each side, once


@pytest.mark.parametrize(
    "offer",
    [
        *(FabricOffer(((1, 0),), parts) for parts in (((0, 0, 5),), ((1, 0, 7),), ((0, 0, 9), (0, 0, -2)))),
        *(FabricOffer(regions, ((0, 0, 7),)) for regions in (((1, -1),), ())),
        *(b"\xc1", b"\x80"),
    ],
)  # fmt: skip
def test_an_offer_that_cannot_be_right_is_refused(pair: FabricPair, offer: FabricOffer | bytes) -> None:
    with pair.lanes() as (gives, takes):

        def give() -> None:
            control = SealedConnection(gives._connection, gives._key, calls=False)
            control.send(offer if isinstance(offer, bytes) else msgspec.msgpack.encode(offer))

        thread = threading.Thread(target=give)
        thread.start()
        with pytest.raises(CheckpointError, match="the other node"):
            takes.take(memoryview(bytearray(7)), lambda: True)
        thread.join()


@pytest.mark.slow
def test_many_transfers_leave_nothing(pair: FabricPair) -> None:
    process, into = psutil.Process(), bytearray(len(DATA))
    for number in range(200):
        if number == 50:
            files, memory = process.num_fds(), process.memory_info().rss
        assert pair.transfer(WHOLE, memoryview(into)) == (True, pair.by)
    assert process.num_fds() <= files
    assert process.memory_info().rss - memory < 16 << 20


def test_each_side_takes_the_lane_that_both_have(pair: FabricPair) -> None:
    with socket.create_server((HOST, 0)) as listener:
        for fabric, kind in ((pair.taker, FabricLane), (None, TcpLane)):
            stream = Stream.new(listener.getsockname()[1], pair.giver.new_place())
            takes = lane_taken(HOST, stream, fabric, 1.0)
            connection, _ = listener.accept()
            with connection:
                token = connection.recv(32)
                assert lane_given(connection, os.urandom(32), stream, pair.giver, 1.0) is None
                gives = lane_given(connection, token, stream, pair.giver, 1.0)
                assert (type(takes), type(gives)) == (kind, kind)
            takes.close()
        stream = Stream.new(listener.getsockname()[1])  # of a node without it
        takes = lane_taken(HOST, stream, pair.taker, 1.0)
        assert type(takes) is TcpLane
        takes.close()


def test_which_provider_is_used() -> None:
    here = ("shm", "sockets", "net", "tcp;ofi_rxm", "udp;ofi_rxd")
    assert [provider_for(way, here) for way in ("auto", "tcp", "fabric")] == ["", "", "net"]
    for hardware in HARDWARE:
        assert [provider_for(way, (*here, hardware)) for way in ("auto", "tcp", "fabric")] == [hardware, "", hardware]


def test_hardware_is_seen_in_the_kernels_tables(tmp_path: Path) -> None:
    assert not has_devices((tmp_path / "none", tmp_path))
    (tmp_path / "mlx5_0").mkdir()
    assert has_devices((tmp_path / "none", tmp_path))


def test_a_choice_that_cannot_be_had_is_said_and_tcp_is_used() -> None:
    said: list[str] = []
    assert open_fabric("tcp", HOST, said.append) is None
    assert said == []
    need_fabric()
    assert open_fabric("fabric", "256.0.0.1", said.append) is None
    assert len(said) == 1
    assert said[0].startswith("copies of snapshots go over TCP: ")
    opened = open_fabric("fabric", HOST, said.append)
    assert isinstance(opened, Fabric)
    opened.close()
