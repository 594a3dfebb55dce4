"""An agent's end of the rank link for tests: a real SOCK_SEQPACKET server that refuses whatever a rank must not say."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path
from typing import TypeVar

from resilio_hpc.core import rank_link
from resilio_hpc.core.rank_link import (
    AgentMessage,
    Attach,
    Finished,
    RankMessage,
    Section,
    StepDone,
    StepsPlanned,
    StopAck,
    StopAt,
    Stopped,
)
from tests.support.waiting import PATIENCE_S

Message = TypeVar("Message", bound=RankMessage)


class Peer:
    """One rank as the agent sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.attach = self._first(connection)
        self._connection = connection
        self._heard: queue.Queue[RankMessage | None] = queue.Queue()
        self._proposed: set[int] = set()
        self._last_step = -1
        self._over = False
        self.violations: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    @staticmethod
    def _first(connection: socket.socket) -> Attach:
        message = rank_link.to_agent.decode(connection.recv(rank_link.MAX_BYTES))
        assert isinstance(message, Attach), f"the first message was {message}"
        return message

    def tell(self, message: AgentMessage) -> None:
        if isinstance(message, StopAt):
            self._proposed.add(message.target)
        self._connection.send(rank_link.to_rank.encode(message))

    def hear(self, kind: type[Message]) -> Message:
        """The next message, which must be of this kind; others of the loop are passed over unless asked for."""
        while True:
            message = self._heard.get(timeout=PATIENCE_S)
            assert not self.violations, self.violations
            if isinstance(message, kind):
                return message
            assert isinstance(message, StepDone | Section | StepsPlanned), f"{message} came instead of {kind.__name__}"

    def hear_end(self) -> None:
        """The rank closed its link and said nothing before that is still unheard but steps."""
        while (message := self._heard.get(timeout=PATIENCE_S)) is not None:
            assert isinstance(message, StepDone | Section | StepsPlanned), f"{message} came instead of the end"
        assert not self.violations, self.violations

    def vanish(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                packet = self._connection.recv(rank_link.MAX_BYTES)
            except OSError:
                packet = b""
            if not packet:
                self._heard.put(None)
                return
            message = rank_link.to_agent.decode(packet)
            self._check(message)
            self._heard.put(message)

    def _check(self, message: RankMessage) -> None:
        if self._over or isinstance(message, Attach):
            self.violations.append(f"{message} out of order")
        if isinstance(message, StepDone):
            if message.step <= self._last_step:
                self.violations.append(f"{message} after step {self._last_step}")
            self._last_step = message.step
        if isinstance(message, StopAck) and message.target not in self._proposed:
            self.violations.append(f"{message} to no proposal")
        self._over = self._over or isinstance(message, Stopped | Finished)


class StrictAgent:
    """Listens at ``path``; ``accept()`` gives the ranks in the order in which they attach."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._listener.settimeout(PATIENCE_S)
        self._connections: list[socket.socket] = []

    def environment(self, rank: int = 0, world_size: int = 1) -> dict[str, str]:
        return {
            "RESILIO_AGENT_SOCKET": str(self.path),
            "RESILIO_ROUND": "3",
            "RESILIO_RUN_DIR": str(self.path.parent),
            "RESILIO_CHECKPOINT_DIR": str(self.path.parent / "checkpoints"),
            "TORCHELASTIC_RESTART_COUNT": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }

    def accept(self) -> Peer:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        return Peer(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
