"""How an agent finds its controller, and when it becomes the controller itself. Pure.

The newest ``epoch.N`` file in the run directory names the controller. Epochs are claimed by exclusive creation, so no
two controllers ever hold the same one. When the controller falls silent or its connection breaks, the agents that are
left look for a newer epoch; the first in the order of succession claims the next one at once, the others later, each
by ``turn_s``, so that normally exactly one claims.

Silence alone proves little: it may be we who are cut off. So whoever hears nothing, but whose connection was not
closed by the other end, also watches the controller's pulse in the run directory (a counter that moves while it leads
at least half of its nodes) and claims only when that stands still. Clocks are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochRecord:
    """Content of an ``epoch.N`` file. ``job``: which job's nodes it belongs to."""

    epoch: int
    node: str
    endpoint: str
    job: str


@dataclass(frozen=True)
class Scan:
    """Action: read the newest epoch record."""


@dataclass(frozen=True)
class Claim:
    """Action: create ``epoch.<epoch>`` exclusively, naming ourselves."""

    epoch: int


@dataclass(frozen=True)
class Follow:
    """Action: connect to this controller and say Hello."""

    record: EpochRecord


class Succession:
    """One agent's view. Times are monotonic seconds."""

    scan_interval_s = 0.1
    turn_s = 1.0
    settle_s = 0.25  # long enough to connect again and hear an answer
    still_s = 2.0  # a pulse that stands still for so long has stopped

    def __init__(self, node: str, job: str, order: Sequence[str], silence_limit_s: float, now: float) -> None:
        self.following: EpochRecord | None = None
        self.newest = 0
        self._node = node
        self._job = job
        self._order = list(order)
        self._limit = silence_limit_s
        self._heard = now
        self._lost_at: float | None = now
        self._next_scan = now
        self._busy = False
        self._fresh_start = True
        self._closed = False  # the other end closed the connection: its process is gone
        self._pulse: tuple[int, int | None] = (0, None)
        self._pulse_seen = now

    @property
    def in_contact(self) -> bool:
        """Whether the controller that we follow is believed to live."""
        return self._lost_at is None

    def heard(self, epoch: int, peers: Sequence[str], now: float) -> None:
        """The controller of ``epoch`` spoke."""
        if self.following is not None and epoch == self.following.epoch:
            self._heard = now
            self._lost_at = None
            self._fresh_start = self._closed = False
            if peers:
                self._order = list(peers)

    def connection_lost(self, now: float) -> None:
        """The transport says that the controller's end is gone."""
        if self._lost_at is None:
            self._lost_at = now
            self._next_scan = now
            self._closed = True

    def silent_s(self, now: float) -> float:
        """How long no controller was heard."""
        return now - self._heard

    def tick(self, now: float) -> Scan | None:
        """Let time pass; perhaps ask for a scan."""
        if self._lost_at is None and now - self._heard > self._limit:
            self._lost_at = now
        if self._lost_at is None or self._busy or now < self._next_scan:
            return None
        self._busy = True
        self._next_scan = now + self.scan_interval_s
        return Scan()

    def scanned(self, record: EpochRecord | None, pulse: int | None, now: float) -> Claim | Follow | None:
        """The answer to a Scan: the newest epoch of any job, or None, and the pulse of its controller."""
        self._busy = False
        if record is not None:
            self.newest = max(self.newest, record.epoch)
            known = self.following.epoch if self.following else 0
            if record.job == self._job and record.epoch > known and not self._is_dead_self(record):
                return self._follow(record, now)
            if (record.epoch, pulse) != self._pulse:
                self._pulse, self._pulse_seen = (record.epoch, pulse), now
        if self._lost_at is None or now < self._lost_at + self._delay() or self._may_live(record, now):
            return None
        self._busy = True
        return Claim(self.newest + 1)

    def _may_live(self, record: EpochRecord | None, now: float) -> bool:
        """Whether the silent controller may still lead others."""
        if record is None or record.job != self._job or record.node == self._node or self._closed:
            return False
        return now < self._pulse_seen + self.still_s

    def claimed(self, epoch: int, won: bool, record: EpochRecord | None, now: float) -> Follow | None:
        """The answer to a Claim. Having won, we follow ourselves."""
        self._busy = False
        self.newest = max(self.newest, epoch)
        return self._follow(record, now) if won and record is not None else None

    def storage_failed(self, now: float) -> None:
        """The run directory did not answer: try again later."""
        self._busy = False
        self._next_scan = now + 1.0

    def _is_dead_self(self, record: EpochRecord) -> bool:
        """At start, a record of our own node is our dead predecessor's."""
        return self._fresh_start and record.node == self._node

    def _delay(self) -> float:
        dead = self.following.node if self.following else None
        heirs = [node for node in self._order if node != dead]
        turn = heirs.index(self._node) if self._node in heirs else len(heirs)
        return (0.0 if self._fresh_start else self.settle_s) + turn * self.turn_s

    def _follow(self, record: EpochRecord, now: float) -> Follow:
        self.following = record
        self.newest = max(self.newest, record.epoch)
        self._lost_at = now  # until it speaks
        self._closed = False
        self._pulse, self._pulse_seen = (record.epoch, None), now
        self._next_scan = now + self._limit / 2
        return Follow(record)
