"""Processes of ``controller_scale.py``: thousands of agents without ranks, over real authenticated sockets.

    python benchmarks/scale_roles.py '{"role": "node", …}'

Roles, a process each: ``node`` is one agent with all that a controller needs (ControllerHost, Gatekeeper, Storage);
``crowd`` is all others, in one loop; ``bare-server`` and ``bare-crowd`` do the same handshakes and as many small
messages without any of our protocol. What happened is told in JSON lines on standard output, in monotonic seconds.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import sys

import msgspec
import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.process.process_tree import die_with_parent
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir.storage import Storage
from scale_agents import SimulatedAgent
from scale_process import JOB, Plan, Process, tell


class Watcher:
    """Tells when every agent of this process has got its Welcome of an epoch, and its Start of a round."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[tuple[str, int], set[str]] = {}

    def heard(self, node: str, message: m.ToAgent) -> None:
        """Handle a message that reached an agent."""
        if isinstance(message, m.Welcome):
            self._note("welcome", message.epoch, node, {"epoch": message.epoch})
        elif isinstance(message, m.Start):
            self._note("start", message.epoch << 16 | message.state.round, node,
                       {"epoch": message.epoch, "round": message.state.round})  # fmt: skip

    def _note(self, what: str, key: int, node: str, fields: dict[str, int]) -> None:
        seen = self._seen.setdefault((what, key), set())
        if not seen:
            tell(f"first {what}", **fields)
        if node not in seen:
            seen.add(node)
            if len(seen) == self._count:
                tell(f"every {what}", **fields)


def run_node(process: Process) -> None:
    """One agent that can be controller."""
    plan = process.plan
    node = plan.nodes[plan.first]
    agent = SimulatedAgent(process, node, Watcher(1).heard)
    counters = wire.Counters()
    gatekeeper = wire.Gatekeeper(process.context, process.keys, counters)
    spool = process.run.path.parent / f"spool-{node}"
    ledger = Ledger(spool / "ledger", f"{JOB}-{node}")
    agent.storage = Storage(process.run.path, spool, JOB)
    agent.host = host = ControllerHost(
        process.context, process.keys, "127.0.0.1", ledger, agent.storage, counters,
        lambda line: tell("said", line=line), agent, JOB,
    )  # fmt: skip
    process.loop.watch(gatekeeper.socket, gatekeeper.serve)
    host_fd = process.loop.watch(host.socket, host.serve)
    process.loop.watch_fd(agent.storage.fileno(), agent.storage.serve)
    agent.begin(f"127.0.0.1:{host.port}")
    phase = ""
    while not agent.gone:
        process.loop.turn()
        host.tick()
        agent.storage.push()
        if host.socket.poll(0):  # more than one turn takes
            process.loop.stirred(host_fd)
        if host.controller is not None and host.controller.run.phase != phase:
            phase = host.controller.run.phase
            tell("phase", phase=phase, round=host.controller.run.round)


def wait_for_word() -> None:
    """Until all processes of the crowd are up."""
    tell("ready")
    sys.stdin.readline()


def run_crowd(process: Process) -> None:
    """All others, when told to."""
    plan = process.plan
    watcher = Watcher(plan.count)
    wait_for_word()
    agents = [SimulatedAgent(process, node, watcher.heard) for node in plan.nodes[plan.first : plan.first + plan.count]]
    for agent in agents:
        agent.begin(f"127.0.0.1:{process.keys.port}")  # the same on all nodes, as where each is a machine
    while not all(agent.gone for agent in agents):
        process.loop.turn()


def run_bare_server(process: Process) -> None:
    """Answers each message with a small one."""
    gatekeeper = wire.Gatekeeper(process.context, process.keys, wire.Counters())
    socket, port = wire.listen(process.context, process.keys, "127.0.0.1")
    tell("bare", port=port)
    poller = zmq.Poller()
    poller.register(gatekeeper.socket, zmq.POLLIN)
    poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if gatekeeper.socket in ready:
            gatekeeper.serve()
        if socket in ready:
            for frames in wire.receive_all(socket):
                wire.send(socket, frames)


def run_bare_crowd(process: Process, exchanges: int = 3) -> None:
    """Make connections, and as many exchanges as a round takes: Hello, Prepare and Start, all small."""
    plan = process.plan
    finished = 0
    wait_for_word()

    def open_one(number: int) -> None:
        name = f"node{number:05d}/{os.urandom(4).hex()}".encode()
        socket = wire.call(process.context, process.keys, f"127.0.0.1:{plan.port}", name)
        socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        wire.send(socket, [b"x" * 100])
        answers = 0

        def take() -> None:
            nonlocal answers, finished
            for _ in wire.receive_all(socket):
                answers += 1
                if answers < exchanges:
                    wire.send(socket, [b"x" * 100])
                    process.loop.stirred(fd)
                else:
                    finished += 1

        fd = process.loop.watch(socket, take)

    for number in range(plan.count):
        process.loop.later(0.0, lambda number=number: open_one(number))  # type: ignore[misc]
    while finished < plan.count:
        process.loop.turn()
    tell("every answer")


ROLES = {"node": run_node, "crowd": run_crowd, "bare-server": run_bare_server, "bare-crowd": run_bare_crowd}


def main() -> None:
    """Play a role until interrupted or killed."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    die_with_parent(os.getppid())
    profile = cProfile.Profile()
    if plan.profile:
        profile.enable()
    with contextlib.suppress(KeyboardInterrupt):
        ROLES[plan.role](Process(plan))
    if plan.profile:
        profile.dump_stats(f"{plan.profile}.{plan.role}-{plan.first}")
    os._exit(0)  # thousands of open sockets would be waited for


if __name__ == "__main__":
    main()
