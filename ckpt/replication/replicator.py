"""The replicator: a process beside the agent that keeps other nodes' snapshots in memory, and sends its own.

``python -m resilio_hpc.ckpt.replication.replicator`` reads requests (see ``messages``) as JSON lines from standard
input, answers on standard output, and ends with its input or its parent. A replicator reads a snapshot from the one
that has it, over an authenticated and encrypted connection; the arena is pinned meanwhile. It makes one fetch at a
time, and threads do the long work. It needs neither torch nor h5py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import zmq

from resilio_hpc.ckpt.replication.boundary_records import PartnerRecords, RecordFeed
from resilio_hpc.ckpt.replication.client import SnapshotTaker
from resilio_hpc.ckpt.replication.fabric import open_fabric
from resilio_hpc.ckpt.replication.messages import (
    Answer,
    Begin,
    Cancel,
    Fetch,
    Follow,
    LostMade,
    MakeLost,
    Request,
    ServeSnapshots,
    Serving,
    decode_request,
)
from resilio_hpc.ckpt.replication.replica_copies import ReplicaCopies
from resilio_hpc.ckpt.replication.server import SnapshotGiver
from resilio_hpc.core import helper_process, wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.standard_streams import say

_TICK_MS = 500


class Replicator:
    """The sockets of a replicator, and its requests."""

    def __init__(self, serve: ServeSnapshots) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        keys = wire.Keys.derive(serve.secret.encode())
        self._gatekeeper = wire.Gatekeeper(self._context, keys, wire.Counters())
        socket, self.port = wire.listen_anywhere(self._context, keys, serve.host)
        arenas, copies = Path(serve.arenas), Path(serve.copies)
        copies.mkdir(mode=0o700, exist_ok=True)
        replicas = ReplicaCopies()
        self._made: list[LostMade] = []
        self._feed, self._records = RecordFeed(arenas), PartnerRecords(self._context, keys, arenas, replicas)
        fabric = open_fabric(serve.transport, serve.host, _say)
        self._giver = SnapshotGiver(socket, serve.host, (arenas, copies), replicas, self._feed, fabric=fabric)
        self._taker = SnapshotTaker(
            self._context, keys, arenas, copies, Path(serve.spill), replicas, serve.silent_s, fabric=fabric
        )  # fmt: skip

    def take(self, request: Request) -> None:
        """Start to carry out an agent's request."""
        if isinstance(request, Fetch):
            self._taker.begin(request)
        elif isinstance(request, Cancel):
            self._taker.cancel(request.numbers)
        elif isinstance(request, Begin):
            self._taker.forget_all_but(request.copies)
            self._giver.begin(request.life)
        elif isinstance(request, Follow):
            self._records.follow(request)
        elif isinstance(request, MakeLost):
            ranks = self._records.make(request.step, request.world_size)
            self._made.append(LostMade(request.number, request.step, request.world_size, ranks))

    def serve_once(self, stdin: int) -> bool:
        """Wait for work and do it, except for standard input. Return True when that can be read."""
        poller = zmq.Poller()
        listener = self._giver.listener.fileno()
        for watched in (stdin, self._gatekeeper.socket, self._giver.socket, listener, self._taker.wakes, self._feed.fd):
            if watched is not None:
                poller.register(watched, zmq.POLLIN)
        wait_s = self._feed.wait_s
        ready = dict(poller.poll(_TICK_MS if wait_s is None else min(_TICK_MS, 1 + int(wait_s * 1000))))
        if self._gatekeeper.socket in ready:
            self._gatekeeper.serve()
        if self._giver.socket in ready:
            self._giver.serve()
        if listener in ready:
            self._giver.accept()
        self._giver.tick()
        self._taker.tick()
        return stdin in ready

    def answers(self) -> list[Answer]:
        """Return the answers for the agent."""
        made, self._made = self._made, []
        return [*self._taker.answers(), *made]


def main() -> int:
    """Serve until the input ends."""
    answers = helper_process.begin("replicator", is_urgent=True)
    if answers is None:
        return 0
    replicator: Replicator | None = None
    buffer = b""
    while True:
        if replicator is None or replicator.serve_once(0):
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                try:
                    request = decode_request(line)
                except WireError as error:
                    _say(str(error))
                    continue
                if isinstance(request, ServeSnapshots):
                    replicator = replicator or Replicator(request)
                    answers.write(encode_line(Serving(replicator.port)))
                elif replicator is not None:
                    replicator.take(request)
        if replicator is not None:
            for answer in replicator.answers():
                answers.write(encode_line(answer))


def _say(text: str) -> None:
    say(f"replicator: {text}")


if __name__ == "__main__":
    sys.exit(main())
