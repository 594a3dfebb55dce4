"""How the ranks of ``counting`` sum their vectors: with torch's gloo, or over plain sockets without torch."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

CONNECT_S = 120.0
"""A peer that is not there after this many seconds never comes; the launcher ends the round long before."""


class RankWorld(Protocol):
    """All ranks of one round."""

    def ones(self, count: int) -> Any:
        """Return a vector of ``count`` int64 that a checkpoint holds; ``np.asarray`` shares its memory."""

    def sum(self, values: Integers) -> Integers:
        """Return the sum over all ranks, the same on each. Raises OSError or RuntimeError when a peer is gone."""

    def agree(self, number: int) -> int:
        """Rank 0's number."""

    def close(self) -> None:
        """Leave."""


class GlooWorld:
    """torch.distributed."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo")

    def ones(self, count: int) -> Any:
        """Return a tensor."""
        return self._torch.ones(count, dtype=self._torch.int64)

    def sum(self, values: Integers) -> Integers:
        """all_reduce."""
        total = self._torch.from_numpy(values.copy())
        self._dist.all_reduce(total)
        return np.asarray(total)

    def agree(self, number: int) -> int:
        """broadcast."""
        drawn = self._torch.tensor([number])
        self._dist.broadcast(drawn, 0)
        return int(drawn)

    def close(self) -> None:
        """Destroy the group."""
        self._dist.destroy_process_group()


class SocketWorld:
    """Rank 0 listens on MASTER_PORT, adds what the others send, and sends the sum back.

    A peer that ends breaks its connection, so all ranks fail soon after it, as with a collective. One that hangs or
    whose node loses power holds the others up until the launcher ends them.
    """

    def __init__(self, rank: int, size: int, address: str, port: int) -> None:
        self._peers: list[socket.socket] = []  # of rank 0: all others; of another: rank 0
        if rank == 0:
            with socket.create_server(("", port), backlog=size) as listener:
                listener.settimeout(CONNECT_S)
                self._peers = [listener.accept()[0] for _ in range(size - 1)]
        else:
            self._peers = [_connect(address, port)]
        for peer in self._peers:
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._leads = rank == 0

    def ones(self, count: int) -> Any:
        """Return an array."""
        return np.ones(count, dtype=np.int64)

    def sum(self, values: Integers) -> Integers:
        """Through rank 0."""
        if not self._leads:
            self._peers[0].sendall(values.tobytes())
            return self._receive(self._peers[0], len(values))
        total = values.copy()
        for peer in self._peers:
            total += self._receive(peer, len(values))
        for peer in self._peers:
            peer.sendall(total.tobytes())
        return total

    def agree(self, number: int) -> int:
        """Sum the number with zeros."""
        return int(self.sum(np.array([number if self._leads else 0], dtype=np.int64))[0])

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()

    @staticmethod
    def _receive(peer: socket.socket, count: int) -> Integers:
        wanted = 8 * count
        data = bytearray()
        while len(data) < wanted:
            more = peer.recv(wanted - len(data))
            if not more:
                raise ConnectionResetError("Connection closed by peer")
            data += more
        return np.frombuffer(data, dtype=np.int64)


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_S)
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def world_of(rank: int, size: int, with_torch: bool) -> RankWorld:
    """Join the world that the launcher describes in the environment."""
    if with_torch:
        return GlooWorld()
    return SocketWorld(rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
