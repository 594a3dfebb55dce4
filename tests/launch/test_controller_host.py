"""The controller's sockets: what was not read yet is no silence."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.consensus.succession_ports import LivesIn
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Clock, ControllerConfig
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import Term
from resilio_hpc.launch.rundir.storage import Storage

KEYS = wire.Keys.derive(b"s" * 32)


class Full:
    """A socket in which messages wait."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self._rest: list[bytes] = []

    def recv(self, flags: int, copy: bool) -> SimpleNamespace:
        assert (flags, copy) == (zmq.NOBLOCK, False)
        if self._rest:
            return SimpleNamespace(bytes=self._rest.pop(0), more=False)
        if not self.waiting:
            raise zmq.Again
        self.waiting -= 1
        self._rest.append(m.to_controller.encode(m.Heartbeat("n1", "a", 1, 0.0, 0)))
        return SimpleNamespace(bytes=b"n1/a/1", more=True)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLOUT | (zmq.POLLIN if self.waiting else 0)


class Listening:
    """A controller that keeps what it is told."""

    def __init__(self) -> None:
        term = Term(1, "n1", "n1:1", first_membership(("n1",)))
        self.run = RunState(ControllerConfig(NodeCounts(1, 1), ("n1",)), term, Clock(time.monotonic, time.time))
        self.heard = 0
        self.behind: list[bool] = []

    def handle(self, message: m.ToController) -> list[Any]:
        self.heard += 1
        return []

    def tick(self, behind: bool) -> list[Any]:
        self.behind.append(behind)
        return []


class OnlyIo(ControllerHost):
    """Without what is written to the run directory."""

    def _write_what_is_due(self, now: float) -> None:
        pass


def test_the_controller_is_told_when_there_was_no_time_to_read_everything(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    nothing: Any = None
    host = OnlyIo(
        context, KEYS, "127.0.0.1", Ledger(tmp_path / "ledger", "w"), cast(Storage, nothing), wire.Counters(),
        lambda line: None, cast(LivesIn, nothing), "local-1",
    )  # fmt: skip
    real, host.socket = host.socket, cast(Any, Full(2 * wire.MAX_PER_READ + 1))
    listening = Listening()
    host.controller = cast(Controller, listening)
    for _ in range(3):
        host.serve()
        host.tick()
    assert listening.heard == 2 * wire.MAX_PER_READ + 1
    assert listening.behind == [True, True, False]
    real.close(0)
    context.destroy(linger=0)
