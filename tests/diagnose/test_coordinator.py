"""The coordinator among real sockets: strangers, silence, a lost coordinator; nothing here needs torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread

import msgspec
import zmq

from resilio_hpc.core import wire
from resilio_hpc.diagnose import CheckResult, interpreter
from resilio_hpc.diagnose.coordinator import CheckCoordinator
from resilio_hpc.diagnose.messages import FROM_NODE, TO_NODE, Alive, Bye, Measured, NodeSettings, Order
from resilio_hpc.diagnose.policy import pair_policy
from tests.support.waiting import PATIENCE_S

POLICY = msgspec.structs.replace(pair_policy(), budget_s=10_000.0)


@dataclass
class Given:
    """A starter that starts nothing, and keeps what it was given."""

    secret: bytes = b""
    port: int = 0
    gone: dict[str, str] = field(default_factory=dict)
    started: Event = field(default_factory=Event)
    closed: Event = field(default_factory=Event)

    def start(self, secret: bytes, port: int) -> None:
        self.secret, self.port = secret, port
        self.started.set()

    def missing(self, heard: Sequence[str]) -> Mapping[str, str]:
        return self.gone

    def close(self) -> None:
        self.closed.set()


class Clock:
    """Goes on only when all nodes that speak have been heard since it last did: a busy machine makes none of them late.

    A quiet node must have come, too. Without a node that speaks, it goes on whenever it is looked at.
    """

    def __init__(self, speaking: Sequence[str], quiet: Sequence[str]) -> None:
        self.heard_at: Mapping[str, float] = {}
        self._speaking, self._quiet, self._now = speaking, quiet, 0.0

    def __call__(self) -> float:
        have_come = all(name in self.heard_at for name in self._quiet)
        if have_come and all(self.heard_at.get(name) == self._now for name in self._speaking):
            self._now += POLICY.silence_s / 3
        return self._now


class Node(Thread):
    """A node that answers every order; ``quiet`` ones stop talking at the first."""

    def __init__(self, name: str, given: Given, quiet: bool = False) -> None:
        super().__init__(daemon=True)
        self._name, self._given, self._quiet = name, given, quiet

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._given.started.wait()
        keys = wire.Keys.derive(self._given.secret)
        socket = wire.call(context, keys, f"127.0.0.1:{self._given.port}", f"{self._name}/1".encode())
        quiet = over = False
        while not over and not self._given.closed.is_set():
            if not quiet:
                wire.send(socket, [FROM_NODE.encode(Alive(True))])
            socket.poll(10)
            for frames in wire.receive_all(socket):
                message = TO_NODE.decode(frames[-1])
                over = over or isinstance(message, Bye)
                if isinstance(message, Order):
                    quiet = self._quiet
                    if not quiet:
                        done = Measured(message.round, "cpu", (0.1,) * 5, (0.1,) * 5 if message.partner else ())
                        wire.send(socket, [FROM_NODE.encode(done)])
        context.destroy(linger=0)


def checked(names: Sequence[str], quiet: Sequence[str] = (), absent: Sequence[str] = ()) -> CheckResult:
    given = Given()
    clock = Clock([name for name in names if name not in (*quiet, *absent)], quiet)
    coordinator = CheckCoordinator(names, POLICY, given, "127.0.0.1", lambda _: None, clock=clock, farewell_s=0.0)
    clock.heard_at = coordinator._heard_at
    for name in names:
        if name not in absent:
            Node(name, given, name in quiet).start()
    return coordinator.run()


def test_nodes_that_answer_pass() -> None:
    result = checked(["a", "b", "c"])
    assert (result.outcome, result.good) == ("fine", ("a", "b", "c"))


def test_a_node_that_falls_silent_and_one_that_never_came_are_named() -> None:
    result = checked(["a", "b", "c", "d", "e", "f"], quiet=["b"], absent=["e"])
    assert {one.node: one.fault for one in result.nodes if one.state == "bad"} == {"b": "silent", "e": "absent"}
    assert result.good == ("a", "c", "d", "f")


def test_where_nobody_comes_nobody_is_named() -> None:
    result = checked(["a", "b", "c", "d"], absent=["a", "b", "c", "d"])
    assert (result.outcome, result.bad) == ("cannot_tell", ())


def test_a_stranger_and_nonsense_change_nothing() -> None:
    given = Given()
    coordinator = CheckCoordinator(["a", "b"], POLICY, given, "127.0.0.1", lambda _: None, farewell_s=0.0)
    Node("a", given).start()
    Node("b", given).start()

    def disturb() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        given.started.wait()
        stranger = wire.Keys.derive(wire.new_secret())
        own = wire.Keys.derive(given.secret)
        sockets = [
            wire.call(context, keys, f"127.0.0.1:{given.port}", name)
            for keys, name in ((stranger, b"a/9"), (own, b"z/1"), (own, b"nobody"), (own, b"\xff/1"))
        ]
        for _ in range(50):
            for socket in sockets:
                for frame in (b"", b"\x01garbage", FROM_NODE.encode(Alive(True)), b"\x01" + b"\xff" * 1000):
                    wire.send(socket, [frame])
            given.closed.wait(0.01)
        context.destroy(linger=0)

    thread = Thread(target=disturb)
    thread.start()
    result = coordinator.run()
    thread.join()
    assert (result.outcome, result.good) == ("fine", ("a", "b"))


def test_a_checker_without_its_coordinator_ends_by_itself() -> None:
    hasty = msgspec.structs.replace(POLICY, silence_s=0.05)
    settings = NodeSettings(secret=wire.new_secret().decode(), endpoint="127.0.0.1:1", node="a", policy=hasty)
    process = subprocess.Popen(interpreter.command("checker"), stdin=subprocess.PIPE)
    process.communicate(msgspec.json.encode(settings) + b"\n", timeout=PATIENCE_S)
    assert process.returncode == 0


def test_the_secret_is_in_no_argument_and_no_environment() -> None:
    settings = NodeSettings(secret=wire.new_secret().decode(), endpoint="127.0.0.1:1", node="a", policy=POLICY)
    with subprocess.Popen(interpreter.command("checker"), stdin=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        for name in ("cmdline", "environ"):
            with open(f"/proc/{process.pid}/{name}", "rb") as file:
                assert settings.secret.encode() not in file.read()
        process.kill()
    assert sys.executable
