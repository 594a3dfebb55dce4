"""The agent's end of the link to its ranks: a Unix SOCK_SEQPACKET socket in a private directory.

A connection belongs to the rank that its first message (Attach) names. An invalid message closes it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import rank_link
from resilio_hpc.core.errors import LaunchError, WireError

MAX_CONNECTIONS = 4096
MAX_PACKETS_PER_READ = 64


@dataclass
class Connection:
    """One rank's link."""

    socket: socket.socket
    rank: rank_link.Attach | None = None


class RankServer:
    """Calls ``heard(round, local_rank, message)`` for every message of an attached rank."""

    def __init__(self, path: Path, heard: Callable[[int, int, rank_link.RankMessage], None]) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.dropped = 0
        self._heard = heard
        self._connections: dict[int, Connection] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            why = "it must be shorter (RESILIO_LOCAL_DIR)" if "too long" in str(error) else error.strerror
            raise LaunchError(f"no socket can be made at {path}: {why}") from None
        path.chmod(0o600)
        self._listener.listen(512)
        self._listener.setblocking(False)

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll for input."""
        yield self._listener.fileno()
        yield from self._connections

    def serve(self, fileno: int) -> None:
        """Serve a readable descriptor."""
        if fileno == self._listener.fileno():
            self._accept()
        elif fileno in self._connections:
            self._read(self._connections[fileno])

    def tell(self, round_number: int, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send to a rank, without waiting for one that does not read."""
        packet = rank_link.to_rank.encode(message)
        for connection in list(self._connections.values()):
            rank = connection.rank
            if rank is not None and rank.round == round_number and rank.local_rank == local_rank:
                try:
                    connection.socket.send(packet)
                except (BlockingIOError, OSError):
                    self.dropped += 1

    def tell_process(self, pid: int, message: rank_link.AgentMessage) -> bool:
        """Send to the rank of this process, whatever its round. Return whether it was sent."""
        for connection in list(self._connections.values()):
            if connection.rank is not None and connection.rank.pid == pid:
                try:
                    connection.socket.send(rank_link.to_rank.encode(message))
                except (BlockingIOError, OSError):
                    self.dropped += 1
                else:
                    return True
        return False

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.geteuid(), 0) or len(self._connections) >= MAX_CONNECTIONS:
            self.dropped += 1
            accepted.close()
            return
        accepted.setblocking(False)
        self._connections[accepted.fileno()] = Connection(accepted)

    def _read(self, connection: Connection) -> None:
        for _ in range(MAX_PACKETS_PER_READ):
            try:
                packet = connection.socket.recv(rank_link.MAX_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._close(connection)
                return
            try:
                message = rank_link.to_agent.decode(packet)
            except WireError:
                self.dropped += 1
                self._close(connection)
                return
            if isinstance(message, rank_link.Attach):
                connection.rank = message
            if connection.rank is None:
                self.dropped += 1
                self._close(connection)
                return
            self._heard(connection.rank.round, connection.rank.local_rank, message)

    def drain(self, local_rank: int) -> None:
        """Read a rank's last messages, so that they count before its exit does."""
        for connection in list(self._connections.values()):
            if connection.rank is None or connection.rank.local_rank == local_rank:
                self._read(connection)

    def _close(self, connection: Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()

    def close(self) -> None:
        """Close everything and remove the socket."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()
        self.path.unlink(missing_ok=True)
