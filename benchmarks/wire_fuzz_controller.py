"""Valid messages with nonsense in them, in any order, to real controllers. Part of ``wire_fuzz.py``."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.state import (
    Action,
    Clock,
    ControllerConfig,
    Finish,
    Record,
    RunHistory,
    Send,
    StepDown,
)
from resilio_hpc.launch.process.announce import announcement
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import Term
from wire_fuzz_values import Values

NODES = ("n0", "n1", "n2", "n3")
MESSAGES_PER_LIFE = 400
AFTER_THE_END = 20
RECORD = ShardRecord(0, "node-0.h5", 1, "own", ())


@dataclass
class Lives:
    """What became of the controllers. ``broke``: the exception and where it was raised."""

    messages: int = 0
    lives: int = 0
    actions: int = 0
    most_agents: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    broke: list[str] = field(default_factory=list)


class Life:
    """One controller, its clock, and what may reach it."""

    def __init__(self, rng: Random, lives: Lives) -> None:
        self.now = 1000.0
        self.rng = rng
        self.lives = lives
        self.values = Values(rng, NODES)
        self.values.epoch = rng.choice([1, 2, 5])
        clock = Clock(lambda: self.now, lambda: 1.7e9 + self.now)
        end_time = rng.choice([None, 1.7e9 + self.now + 60])
        config = ControllerConfig(
            NodeCounts(rng.randint(1, 4), rng.randint(4, 8), rng.randint(1, 2)), NODES, chained=rng.random() < 0.5,
            join_timeout_s=rng.choice([0.0, 5.0]), end_time=end_time, max_without_progress=rng.choice([0, 3, 1000]),
            restart_policy=rng.choice(["in-process", "failed", "failed"]),
        )  # fmt: skip
        term = Term(self.values.epoch, "n0", "n0:1", first_membership(NODES), first=rng.random() < 0.5)
        self.sense = rng.choice([0.5, 0.9, 0.98])  # up to here events lead on: few rounds come up amid much nonsense
        self.stepped_down = False
        self.controller = Controller(config, term, clock)
        self.step(self.controller.begin)

    def live(self, messages: int) -> None:
        """Until so many messages were taken."""
        for node in NODES:
            if self.rng.random() < 0.8:
                self.step(lambda node=node: self.controller.handle(self._hello(node)))  # type: ignore[misc]
        left = AFTER_THE_END
        for _ in range(messages):
            left -= self.controller.run.phase == "ended"
            if left < 0 or self.stepped_down:
                return
            self.step(self._event())
            self.values.round = self.controller.run.round
            self.values.now = self.now
            self.lives.messages += 1
            self.lives.phases[self.controller.run.phase] += 1
            self.lives.most_agents = max(self.lives.most_agents, len(self.controller.run.agents))

    def _hello(self, node: str) -> m.Hello:
        return m.Hello(node, "a", self.controller.run.epoch, f"{node}:1", node, 1)

    def _sensible(self, node: str) -> m.ToController:
        """Return what leads on, so that later phases are reached."""
        controller, rng = self.controller, self.rng
        epoch, number, now = controller.run.epoch, controller.run.round, self.now
        alone = controller.run.config.restart_policy == "failed"
        words: dict[str, list[m.ToController]] = {
            "preparing": [m.RanksStopped(node, epoch, number, ()), m.StoreOpened(node, epoch, number, 29400)],
            "starting": [m.RanksStarted(node, epoch, number, 0.1, "fork"),
                         self._failed(node) if alone else m.FirstStep(node, epoch, number, 1, now)],
            "running": [m.SnapshotWhole(node, epoch, number, number + 2, 1, 0.1), self._failed(node),
                        m.RankRestarted(node, epoch, number, NODES.index(node), rng.randint(0, 3), 0.1),
                        m.StepPersisted(node, epoch, number, number + 2, RECORD),
                        m.ManifestWritten(node, epoch, number, number + 2, 0.1)],
        }  # fmt: skip
        always: list[m.ToController] = [
            self._hello(node), m.Heartbeat(node, "a", epoch, now, number, echo=now),
            m.VotersUpdated(node, epoch, controller.run.membership.number),
        ]  # fmt: skip
        return rng.choice([*always, *words.get(controller.run.phase, [])])

    def _failed(self, node: str) -> m.RankFailed:
        rank = NODES.index(node) if self.rng.random() < 0.9 else self.rng.randint(-1, 9)
        failure = m.RankFailure(node, rank, 0, "signal", 1.7e9 + self.now, None, 9)
        return m.RankFailed(node, self.controller.run.epoch, self.controller.run.round, failure)

    def _event(self) -> Any:
        rng, controller = self.rng, self.controller
        self.now += rng.choice([0.0, 0.001, 0.1]) if rng.random() < 0.98 else rng.choice([1.0, 6.0, 60.0])
        kind = rng.random()
        if kind < 0.1:
            return controller.tick
        if kind < 0.13:
            verdict = ("completed", 0) if rng.random() < 0.02 else None
            past = RunHistory(tuple(rng.sample(range(20), rng.randint(0, 3))), rng.randint(-1, 5), verdict)
            return lambda: controller.inform(past)
        if kind < 0.132:
            return controller.verdict_written
        if kind < 0.14:
            return controller.epoch_recorded
        if kind < self.sense:
            message = self._sensible(rng.choice(NODES))
            return lambda: controller.handle(message)
        message = m.to_controller.decode(m.to_controller.encode(self.values.message(m.ToController)))
        return lambda: controller.handle(message)

    def step(self, event: Any) -> None:
        """One event; what comes of it must be fit to be sent, written down and read by people."""
        try:
            for action in event():
                self._check(action)
        except Exception as error:  # noqa: BLE001 - finding these is what this is for
            calls = [
                f"{call.filename.rsplit('/', 1)[-1]}:{call.lineno}"
                for call in traceback.extract_tb(error.__traceback__)
            ]
            self.lives.broke.append(f"{error!r:.200} at {' > '.join(calls[-4:])}")

    def _check(self, action: Action) -> None:
        self.lives.actions += 1
        if isinstance(action, Send):
            m.to_agent.decode(m.to_agent.encode(action.message))
        elif isinstance(action, Record):
            json.dumps(action.fields)
            announcement(action.kind, action.fields)
        elif isinstance(action, Finish):
            json.dumps(action.fields)
        elif isinstance(action, StepDown):
            self.stepped_down = True


def fuzz_controller(messages: int, seed: int) -> Lives:
    """So many messages, spread over controllers that live for a while each."""
    rng = Random(seed)
    lives = Lives()
    while lives.messages < messages:
        lives.lives += 1
        try:
            Life(rng, lives).live(min(MESSAGES_PER_LIFE, messages - lives.messages))
        except WireError:  # a value that cannot be encoded: it cannot be sent
            continue
    return lives
