"""The checker: one process per node, which keeps a prober and only exchanges messages with the coordinator.

It ends when the check is over, when the coordinator is silent for too long, or when the check's whole budget is spent,
whatever comes first. Its prober dies with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.diagnose import interpreter, start_checks
from resilio_hpc.diagnose.messages import (
    FROM_NODE,
    TO_NODE,
    Alive,
    Bye,
    CoordinatorAlive,
    Drop,
    Failed,
    FromNode,
    Given,
    NodeSettings,
    Order,
    ToNode,
)
from resilio_hpc.diagnose.probe_process import ProbeProcess
from resilio_hpc.diagnose.prober import die_with

ALIVE_S = 1.0
_LOST = 2  # times the silence that the coordinator permits: it may be busy with thousands of checkers


class Checker:
    """A checker. ``prober``: another command, for tests."""

    def __init__(self, settings: NodeSettings, node: str, prober: Sequence[str] = ()) -> None:
        self.policy = settings.policy
        self._prober = ProbeProcess(self.policy, settings.threads, prober)
        context: zmq.Context[Any] = zmq.Context.instance()
        keys = wire.Keys.derive(settings.secret.encode())
        name = f"{node}/{secrets.token_hex(4)}".encode()
        self._socket = wire.call(context, keys, settings.endpoint, name)
        self._over = False
        self._checks = StartChecks() if settings.start_checks else None
        self._unable: Order | None = None
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Run until the check is over."""
        end = time.monotonic() + self.policy.budget_s + self.policy.silence_s
        said_at = float("-inf")
        self._prober.start()
        try:
            while not self._over and time.monotonic() < min(end, self._heard_at + _LOST * self.policy.silence_s):
                said = (self._ready, self._why_not)
                if time.monotonic() >= said_at + ALIVE_S:
                    said_at = time.monotonic()
                    self._say(Alive(self._ready, self._why_not[:500]))
                self._turn()
                if said != (self._ready, self._why_not):
                    said_at = float("-inf")
        finally:
            self._prober.kill()
            if self._checks is not None:
                self._checks.end()
            self._socket.close()

    @property
    def _ready(self) -> bool:
        checked = self._checks is None or self._checks.over
        return checked and self._prober.ready and not self._why_not

    @property
    def _why_not(self) -> str:
        """Return why this node cannot work, as far as it is known."""
        return (self._checks.found if self._checks is not None else "") or self._prober.why_not

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        pipe = self._prober.fileno()
        if pipe is not None:
            poller.register(pipe, zmq.POLLIN)
        wait_s = max(0.0, min(ALIVE_S / 2, self._prober.deadline - time.monotonic()))
        ready = dict(poller.poll(int(wait_s * 1000) + 1))
        if pipe is not None and (pipe in ready or time.monotonic() >= self._prober.deadline):
            for message in self._prober.read():
                self._say(message)
        for frames in wire.receive_all(self._socket):
            try:
                self._heard(TO_NODE.decode(frames[-1]))
            except WireError:
                continue  # only the coordinator has the key; a newer one may have other messages
        if self._checks is not None:
            self._checks.look()
        self._tell_unable()

    def _heard(self, message: ToNode) -> None:
        self._heard_at = time.monotonic()
        match message:
            case Order() if self._ready:
                self._prober.begin(message)
            case Order():
                self._unable = message
                self._prober.try_again()
            case Given():
                self._prober.give(message)
            case Drop():
                self._unable = None
                self._prober.drop(message.round)
            case Bye():
                self._over = True
            case CoordinatorAlive():
                pass

    def _tell_unable(self) -> None:
        """Answer an order that came without a prober, as soon as there is one, or none can be started."""
        order = self._unable
        if order is None:
            return
        if self._ready:
            self._unable = None
            self._prober.begin(order)
        elif self._why_not:
            self._unable = None
            self._say(Failed(order.round, "starting", "not_ready", self._why_not[:500]))

    def _say(self, message: FromNode) -> None:
        wire.send(self._socket, [FROM_NODE.encode(message)])


class StartChecks:
    """The node's health checks, in a process that is killed when its time is up. ``found``: a fault."""

    def __init__(self, argv: Sequence[str] = (), limit_s: float = start_checks.SECONDS) -> None:
        """Start them; ``argv``: another command, for tests."""
        self.found = ""
        self.over = False
        self._until = time.monotonic() + limit_s
        self._process = subprocess.Popen(
            argv or interpreter.command("start_checks"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        )  # fmt: skip

    def look(self) -> None:
        """Take the result, if there is one now: checks that fail, or hang, tell nothing."""
        if self.over:
            return
        code = self._process.poll()
        if code is not None and self._process.stdout is not None:
            line = self._process.stdout.read(4096).decode(errors="replace").strip()  # it fits into the pipe
            self.found = line if code == 0 else ""
        self.over = code is not None or time.monotonic() > self._until
        if self.over:
            self.end()

    def end(self) -> None:
        """Kill them, if they still run. Where a file system hangs, not even that ends them."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def node_name(settings: NodeSettings) -> str:
    """Return which node this is."""
    return settings.node or os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def main(prober: Sequence[str] = ()) -> NoReturn:
    """Take settings on standard input."""
    settings = msgspec.json.decode(sys.stdin.readline(), type=NodeSettings)
    if settings.parent:
        die_with(settings.parent)
    Checker(settings, node_name(settings), prober).run()
    sys.exit(0)


if __name__ == "__main__":
    main()
