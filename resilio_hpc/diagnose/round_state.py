"""One round of a pair check in the coordinator's view: who did what, and whose failure it is. Pure.

Messages and times go in, messages to the nodes come out. A node whose partner failed receives ``Drop``, to give up: at
once where it waits for the partner, after a moment where it may report about the collective itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from msgspec.structs import replace

from resilio_hpc.diagnose.messages import (
    Drop,
    Entered,
    Failed,
    FromNode,
    Get,
    Given,
    Measured,
    Order,
    Phase,
    Put,
    ToNode,
)
from resilio_hpc.diagnose.observations import Fault, Observation, Pair, Round, RoundOutcome, Times

LAST_WORDS_S = 3.0  # for the other half of a collective that failed
_PHASES: tuple[Phase, ...] = get_args(Phase)
_OWN_WORK = ("starting", "computing")
MOST_WAITING = 0.3
MOST_VALUES = 64  # that a process group may store: it needs no more

Letters = list[tuple[str, ToNode]]


@dataclass
class _Part:
    """One node's part of a pair."""

    node: str
    partner: str
    phase: Phase = "starting"
    over: bool = False
    fault: Fault | None = None
    alone: bool = False
    detail: str = ""
    times: Times = field(default_factory=Times)
    delays: tuple[float, ...] = ()  # of its collective
    passed: bool = False
    values: dict[str, bytes] = field(default_factory=dict)  # that it stored
    wants: set[str] = field(default_factory=set)
    failed_at: float = 0.0


class PairingRound:
    """``number`` from 1 on; each node is in one pair at most."""

    def __init__(self, number: int, pairs: Iterable[Pair]) -> None:
        self.number = number
        self._parts: dict[str, _Part] = {}
        for pair in pairs:
            for node in pair:
                self._parts[node] = _Part(node, next((other for other in pair if other != node), ""))

    @property
    def open_nodes(self) -> tuple[str, ...]:
        """Return those that are not done."""
        return tuple(part.node for part in self._parts.values() if not part.over)

    @property
    def over(self) -> bool:
        """Return whether all nodes have ended."""
        return not self.open_nodes

    def orders(self) -> Letters:
        """Return the orders that begin the round."""
        ranks: dict[str, int] = {}
        for part in self._parts.values():
            ranks[part.node] = 1 if part.partner in ranks else 0
        return [(part.node, Order(self.number, part.partner, ranks[part.node])) for part in self._parts.values()]

    def heard(self, node: str, message: FromNode, now: float) -> Letters:
        """Take a node's message."""
        part = self._parts.get(node)
        if part is None or part.over or getattr(message, "round", None) != self.number:
            return []
        match message:
            case Entered(phase=phase):
                part.phase = max(part.phase, phase, key=_PHASES.index)
                return self._if_the_partner_has_failed(part, now)
            case Put(key=key, value=value):
                return self._put(part, key, value)
            case Get(key=key):
                return self._want(part, key)
            case Measured():
                part.over = part.passed = True
                part.times = Times(message.compute, message.collective, message.device, message.waited)
                part.delays = message.delays
            case Failed():
                part.times = Times(message.compute, (), message.device, message.waited)
                part.phase = message.phase
                return self._failed(part, message.fault, message.detail, message.phase in _OWN_WORK, now)
        return []

    def gone(self, node: str, fault: Fault, detail: str, now: float) -> Letters:
        """Take note that a node is not heard any more."""
        part = self._parts.get(node)
        return [] if part is None or part.over else self._failed(part, fault, detail, True, now)

    def tick(self, now: float) -> Letters:
        """Let nodes give up whose partner has failed, so that none waits for ever."""
        return [
            letter
            for part in self._parts.values()
            if not part.over
            for letter in self._if_the_partner_has_failed(part, now)
        ]

    def _put(self, part: _Part, key: str, value: bytes) -> Letters:
        if len(part.values) >= MOST_VALUES:
            return []
        part.values[key] = value
        other = self._parts.get(part.partner)
        if other is None or key not in other.wants:
            return []
        other.wants.discard(key)
        return [(other.node, Given(self.number, key, value))]

    def _want(self, part: _Part, key: str) -> Letters:
        other = self._parts.get(part.partner)
        if other is not None and key in other.values:
            return [(part.node, Given(self.number, key, other.values[key]))]
        if len(part.wants) < MOST_VALUES:
            part.wants.add(key)
        return []

    def _failed(self, part: _Part, fault: Fault, detail: str, alone: bool, now: float) -> Letters:
        part.over, part.fault, part.detail, part.alone, part.failed_at = True, fault, detail, alone, now
        other = self._parts.get(part.partner)
        return self._if_the_partner_has_failed(other, now) if other is not None and not other.over else []

    def _if_the_partner_has_failed(self, part: _Part, now: float) -> Letters:
        other = self._parts.get(part.partner)
        if other is None or not other.over or other.passed or part.phase in _OWN_WORK:
            return []  # its own work goes on: it may fail too
        if not other.alone and now < other.failed_at + LAST_WORDS_S:
            return []
        part.over = True
        if not other.alone:
            part.fault = "hung" if other.fault == "hung" else "failed"
            part.detail = "it did not come back from the collective"
        return [(part.node, Drop(self.number))]

    def observations(self) -> Round:
        """Return the observations of the round.

        It is over, or time is up: nodes that are not done then were not seen.
        """
        return tuple(self._observation(part) for part in self._parts.values() if part.over)

    def _observation(self, part: _Part) -> Observation:
        other = self._parts.get(part.partner)
        outcome = RoundOutcome.TOGETHER
        if part.alone:
            outcome = RoundOutcome.ALONE
        elif part.partner and (other is None or other.alone):
            outcome = RoundOutcome.WAITED
        elif part.fault is None and (not part.partner or (other is not None and other.passed)):
            outcome = RoundOutcome.PASSED
        fault = part.fault if outcome in (RoundOutcome.ALONE, RoundOutcome.TOGETHER) else None
        if outcome is RoundOutcome.TOGETHER and fault is None:
            fault = "failed"
        times = part.times
        if outcome is RoundOutcome.PASSED and other is not None:
            times = replace(times, collective=_without(times.collective, part.delays, other.delays))
        return Observation(part.node, part.partner, outcome, times, fault, part.detail if fault else "")


def _without(blocks: tuple[float, ...], *delays: tuple[float, ...]) -> tuple[float, ...]:
    """Return the collective's times without the time that either node waited for a CPU: the other one waits with it.

    Blocks in which that is much tell nothing about the link.
    """
    lists = [delay if len(delay) == len(blocks) else (0.0,) * len(blocks) for delay in delays]
    lost = [sum(parts) for parts in zip(*lists, strict=True)]
    return tuple(block - less for block, less in zip(blocks, lost, strict=True) if less <= block * MOST_WAITING)
