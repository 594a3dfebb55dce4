"""A giver and a taker of snapshots as in a replicator, on one node."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

from resilio_hpc.ckpt.replication.boundary_records import RecordFeed
from resilio_hpc.ckpt.replication.client import SnapshotTaker
from resilio_hpc.ckpt.replication.messages import (
    Answer,
    Have,
    StillFetching,
    Want,
    asking,
    giving,
)
from resilio_hpc.ckpt.replication.replica_copies import ReplicaCopies
from resilio_hpc.ckpt.replication.server import SnapshotGiver
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from tests.support.waiting import until

POOL = ThreadPoolExecutor(4)
KEYS = wire.Keys.derive(wire.new_secret())
HOST = "127.0.0.1"
CHUNK = 1 << 20


@dataclass
class Node:
    """A giver and a taker as in a replicator, whose answers are collected."""

    root: Path
    context: zmq.Context[zmq.Socket[bytes]]
    limits: dict[str, float] = field(default_factory=dict)
    """Of the giver."""
    heard: list[Answer] = field(default_factory=list)
    readers: list[zmq.Socket[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arenas, self.copies = self.root / "arenas", self.root / "copies"
        for path in (self.arenas, self.copies):
            path.mkdir(parents=True)
        self.replicas = ReplicaCopies()
        self.gatekeeper = wire.Gatekeeper(self.context, KEYS, wire.Counters())
        asked, port = wire.listen_anywhere(self.context, KEYS, HOST)
        self.endpoint = f"{HOST}:{port}"
        self.giver = SnapshotGiver(
            asked, HOST, (self.arenas, self.copies), self.replicas, RecordFeed(self.arenas), **self.limits
        )  # fmt: skip
        self.takes()

    def save(self, rank: int, step: int, floats: int = 1000) -> ArenaPair:
        pair = ArenaPair(self.arenas, Owner(rank, rank, 8, 8, 0, "own", "run"), self.root / "spill")
        state = {"w": np.full(floats, rank * 1000 + step, dtype=np.float32)}
        Snapshot(pair, step, flatten(state), POOL).finish()
        return pair

    def serve(self) -> None:
        poller = zmq.Poller()
        watched = (self.gatekeeper.socket, self.giver.socket, self.giver.listener.fileno(), self.taker.wakes)
        for one in watched:
            poller.register(one, zmq.POLLIN)
        ready = dict(poller.poll(50))
        if self.gatekeeper.socket in ready:
            self.gatekeeper.serve()
        if self.giver.socket in ready:
            self.giver.serve()
        if self.giver.listener.fileno() in ready:
            self.giver.accept()
        self.giver.tick()
        self.taker.tick()
        self.heard += self.taker.answers()

    def serve_until(self, holds: Callable[[], bool], what: str = "it holds") -> None:
        until(lambda: (self.serve(), holds())[1], what, lambda: self.heard, poll_s=0)

    def takes(self, **limits: float) -> None:
        """With another taker from now on."""
        self.taker = SnapshotTaker(
            self.context, KEYS, self.arenas, self.copies, self.root / "spill", self.replicas, **limits
        )

    def ends(self) -> Answer:
        """How the next fetch ends."""
        self.serve_until(lambda: any(not isinstance(answer, StillFetching) for answer in self.heard))
        found = [answer for answer in self.heard if not isinstance(answer, StillFetching)]
        self.heard.clear()
        assert len(found) == 1
        return found[0]

    def asks(self, want: Want) -> Have:
        """What this node's giver answers to a new reader."""
        asked = wire.call(self.context, KEYS, self.endpoint, b"reader")
        self.readers.append(asked)
        asked.send(asking.encode(want))
        self.serve_until(lambda: bool(asked.poll(0)))
        have = giving.decode(asked.recv_multipart()[0])
        assert isinstance(have, Have)
        return have


@contextmanager
def node_with(**limits: float) -> Iterator[Node]:
    """``limits``: of the giver, in seconds."""
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = Node(Path(name), context, limits)
        yield made
        made.giver.listener.close()
        for reader in made.readers:
            reader.close(0)
        context.destroy(linger=0)


def steps(directory: Path) -> list[tuple[int, int]]:
    return sorted((held.rank, held.step) for held in arena.scan(directory))


def value(directory: Path, rank: int, step: int | None = None) -> float:
    """The one number that fills a rank's snapshot, each of its blocks verified. ``step``: where there are several."""
    (held,) = [held for held in arena.scan(directory) if held.rank == rank and step in (None, held.step)]
    with ArenaSource(held.path) as source:
        (record,) = source.tensors
        into = np.empty(record.shape, dtype=np.float32)
        source.fill([(record, memoryview(into.view(np.uint8)))], POOL)
    assert (into == into[0]).all()
    return float(into[0])


def content(directory: Path, rank: int, step: int) -> tuple[object, ...]:
    """All that a rank's snapshot says, each block verified."""
    (held,) = [held for held in arena.scan(directory) if (held.rank, held.step) == (rank, step)]
    with ArenaSource(held.path) as source:
        found = []
        for record in source.tensors:
            into = bytearray(record.size_bytes)
            source.fill([(record, memoryview(into))], POOL)
            found.append((record.path, record.dtype, record.shape, record.slab, bytes(into)))
        return source.tree, held.local_rank, held.local_world_size, found
