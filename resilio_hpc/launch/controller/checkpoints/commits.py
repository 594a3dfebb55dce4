"""Which step is made durable next, and when it is committed. Pure; part of the controller.

One step is in flight at a time, the newest that every member holds whole in memory. The manifest is written when every
member's file is durable; only then is the step committed.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct, field

from resilio_hpc.ckpt.format.manifest import ShardRecord


class CommitTracker(Struct):
    """The checkpoints of one round. ``begin`` starts a round; steps are optimizer steps.

    ``known``: the committed steps, a set to which others may add.
    """

    nodes: frozenset[str] = frozenset()
    known: set[int] = field(default_factory=set)
    in_flight: int = -1
    _given_up: int = -1  # the newest step that could not be written
    _whole: dict[int, set[str]] = field(default_factory=dict)
    _records: dict[str, ShardRecord] = field(default_factory=dict)

    @property
    def committed(self) -> int:
        """Return the newest committed step, -1 without one."""
        return max(self.known, default=-1)

    def begin(self, nodes: Collection[str]) -> None:
        """Begin a round: the step in flight is abandoned; its files stay uncommitted and are overwritten."""
        self.nodes = frozenset(nodes)
        self.in_flight = self._given_up = -1
        self._whole.clear()
        self._records.clear()

    def snapshot_whole(self, node: str, step: int) -> int | None:
        """Take note that ``node`` holds ``step`` in memory. Return the step to persist now, if any."""
        if node in self.nodes and step > self.committed:
            self._whole.setdefault(step, set()).add(node)
        return self._next()

    def persisted(self, node: str, step: int, record: ShardRecord) -> tuple[ShardRecord, ...]:
        """Take note that ``node``'s file of ``step`` is durable.

        After the last node's, return all records in node-name order.
        """
        if step != self.in_flight or node not in self.nodes:
            return ()
        self._records[node] = record
        return self.records

    @property
    def unwritten(self) -> frozenset[str]:
        """Return the nodes whose files of the step in flight are not durable; empty without one in flight."""
        return self.nodes - self._records.keys() if self.in_flight >= 0 else frozenset()

    def is_settled(self, step: int) -> bool:
        """Return whether ``step`` or a newer one is durable, or never will be."""
        return step <= max(self.committed, self._given_up)

    @property
    def records(self) -> tuple[ShardRecord, ...]:
        """Return all nodes' records of the step in flight, in node-name order; empty while one is missing."""
        if self.in_flight < 0 or self._records.keys() != self.nodes:
            return ()
        return tuple(self._records[name] for name in sorted(self._records))

    def commit(self, step: int) -> int | None:
        """Take note that the manifest of ``step`` is durable. Return the next step to persist, if any."""
        self.known.add(step)
        if step == self.in_flight:
            self.in_flight = -1
        return self._next()

    def abandon(self, step: int) -> int | None:
        """Take note that ``step`` could not be written. Return the next step to persist, if any."""
        self._whole.pop(step, None)
        self._given_up = max(self._given_up, step)
        if step == self.in_flight:
            self.in_flight = -1
        return self._next()

    def _next(self) -> int | None:
        if self.in_flight >= 0:
            return None
        whole = [step for step, nodes in self._whole.items() if nodes >= self.nodes and step > self.committed]
        if not whole:
            return None
        self.in_flight = max(whole)
        self._records.clear()
        for step in [step for step in self._whole if step <= self.in_flight]:
            del self._whole[step]
        return self.in_flight
