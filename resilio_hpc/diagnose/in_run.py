"""The coordinator of a test of nodes in a run, as a process of its own: agents start the checkers, ranks pause.

It ends with its parent, whose pipe is its standard input: a ``TestRequest``, and ``go`` when the ranks pause. It
answers on standard output with ``Listens``, ``ProbersReady`` and ``Tested``. One line of JSON each.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec

from resilio_hpc.diagnose.coordinator import CheckCoordinator
from resilio_hpc.diagnose.messages import NodeSettings
from resilio_hpc.diagnose.policy import PairPolicy
from resilio_hpc.diagnose.result import CheckResult

GO = b"go\n"


class TestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to test, and the address at which this node is reached.

    ``threads`` 0: all CPUs of a node. ``start_checks``: the nodes' health checks are part of it.
    """

    __test__ = False  # pytest: no class of tests

    nodes: tuple[str, ...]
    policy: PairPolicy
    address: str
    threads: int = 0
    start_checks: bool = False


class Listens(msgspec.Struct, frozen=True, tag="listens"):
    """Checkers may be started with these settings; each node adds its name."""

    settings: NodeSettings


class ProbersReady(msgspec.Struct, frozen=True, tag="ready"):
    """All checkers wait for orders, or as many as will be: the ranks may pause."""


class Tested(msgspec.Struct, frozen=True, tag="tested"):
    """The result."""

    result: CheckResult


Answer = Listens | ProbersReady | Tested


class AgentStarter:
    """Lets the agents start the checkers, by way of this process's parent."""

    def __init__(self, request: TestRequest) -> None:
        self._request = request

    def start(self, secret: bytes, port: int) -> None:
        """Say where this process listens."""
        request = self._request
        say(Listens(NodeSettings(
            secret=secret.decode(), endpoint=f"{request.address}:{port}", threads=request.threads,
            start_checks=request.start_checks, policy=request.policy,
        )))  # fmt: skip

    def missing(self, _heard: Sequence[str]) -> Mapping[str, str]:
        """Return nothing: silence tells which nodes do not come."""
        return {}

    def close(self) -> None:
        """Leave it to the agents to end the checkers."""


def say(answer: Answer) -> None:
    """Write one line."""
    data = msgspec.json.encode(answer) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def has_word() -> bool:
    """Return whether the parent has written more, or is gone."""
    return bool(select.select([0], [], [], 0)[0])


def main() -> None:
    """Run one test."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    heard = b""
    while b"\n" not in heard:
        heard += _read()
    line, _, heard = heard.partition(b"\n")
    request = msgspec.json.decode(line, type=TestRequest)
    coordinator = CheckCoordinator(
        request.nodes, request.policy, AgentStarter(request), request.address, lambda _: None
    )
    try:
        coordinator.begin()
        say(ProbersReady())
        while heard != GO:
            coordinator.wait_until(has_word)
            heard += _read()
        say(Tested(coordinator.examine()))
    finally:
        coordinator.part()


def _read() -> bytes:
    """Return what the parent wrote. End with the parent."""
    data = os.read(0, 1 << 16)
    if not data:
        sys.exit(0)
    return data


if __name__ == "__main__":
    main()
