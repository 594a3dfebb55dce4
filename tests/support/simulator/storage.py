"""A shared file system that takes its time, hangs, and fails.

An agent's storage child and its saver each do one thing after the other. What hangs is done when the hanging is over,
perhaps even though the agent that asked for it is dead: a process that waits for a disk cannot be killed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.support.virtual_cluster.directory import SharedStorage

if TYPE_CHECKING:
    from tests.support.simulator.world import SeededWorld
    from tests.support.virtual_cluster.agent import VirtualAgent

SLOW_SHARE, SLOW = 0.15, 10.0  # how many files take how many times as long
Work = Callable[[], None]


class SeededStorage(SharedStorage):
    """``hangs``: the nodes on which it does."""

    def __init__(self, world: SeededWorld, draw: Random) -> None:
        super().__init__(world)
        self.hangs: dict[str, int] = {}  # node → how many faults have it hang
        self._seeded = world
        self._random = draw.random
        self._waiting: list[tuple[VirtualAgent, bool, Work]] = []  # (whose, by the saver, what)
        self._free: dict[tuple[VirtualAgent, bool], float] = {}  # when each child has time again

    def ask(self, agent: VirtualAgent, question: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        def serve() -> None:
            reply = None if self._seeded.storage_fails else question()
            self._seeded.felt["failed"] += self._seeded.storage_fails
            self._seeded.after(0.001 + 0.01 * self._random(), lambda: agent.event(lambda: answer(reply)))

        self._queue(agent, False, 0.002 + 0.02 * self._random(), serve)

    def save(self, agent: VirtualAgent, seconds: float, write: Callable[[], None]) -> None:
        slow = SLOW if self._random() < SLOW_SHARE else 1.0
        self._queue(agent, True, slow * seconds * (0.5 + self._random()), write)

    def _queue(self, agent: VirtualAgent, saver: bool, seconds: float, work: Work) -> None:
        at = max(self._seeded.now, self._free.get((agent, saver), 0.0)) + seconds
        self._free[agent, saver] = at
        self._seeded.after(at - self._seeded.now, partial(self._do, agent, saver, work))

    def _do(self, agent: VirtualAgent, saver: bool, work: Work) -> None:
        if self.hangs.get(agent.node) or any(known[0] is agent and known[1] == saver for known in self._waiting):
            self._waiting.append((agent, saver, work))
            self._seeded.felt["hung"] += 1
        elif agent.alive:
            work()

    def hang(self, nodes: tuple[str, ...]) -> None:
        for node in nodes:
            self.hangs[node] = self.hangs.get(node, 0) + 1

    def go_on(self, nodes: tuple[str, ...]) -> None:
        """It answers again: what has waited is done in its order."""
        for node in nodes:
            self.hangs[node] -= 1
        ready = [entry for entry in self._waiting if not self.hangs.get(entry[0].node)]
        self._waiting = [entry for entry in self._waiting if self.hangs.get(entry[0].node)]
        first: set[tuple[VirtualAgent, bool]] = set()
        for agent, saver, work in ready:
            in_flight = (agent, saver) not in first
            first.add((agent, saver))
            if agent.alive:
                self._queue(agent, saver, 0.01 * self._random(), work)
            elif in_flight and not agent.site.off and self._random() < 0.5:
                self._seeded.felt["done for the dead"] += 1
                work()
