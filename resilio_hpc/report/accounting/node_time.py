"""Time weighted by nodes: what each node of each job was held for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from resilio_hpc.report.accounting.causes import TimeCause, TimeSpan
from resilio_hpc.report.accounting.part_facts import PartFacts
from resilio_hpc.report.accounting.run_time import PartTime, RunTime


@dataclass(frozen=True)
class NodesSpan:
    """Nodes from ``begin_us`` to ``end_us``. ``held``: as a job's nodes, else as nodes of a job without ranks."""

    nodes: tuple[str, ...]
    begin_us: int
    end_us: int
    held: bool


@dataclass(frozen=True)
class NodeTime:
    """Time of nodes. ``by_cause``: microseconds, summed over nodes; ``names``: all nodes, by name.

    ``spans``: when nodes were held, and when they had no ranks meanwhile.
    """

    by_cause: dict[TimeCause, int]
    names: tuple[str, ...]
    spans: tuple[NodesSpan, ...]

    @property
    def us(self) -> int:
        """Return the sum over all causes."""
        return sum(self.by_cause.values())


@dataclass(frozen=True)
class _Staff:
    """From ``since_us`` on, a job's nodes are ``held``, and ranks are on ``members``; None: no round has begun."""

    since_us: int
    held: frozenset[str]
    members: frozenset[str] | None
    working: int

    @property
    def idle(self) -> frozenset[str]:
        return frozenset() if self.members is None else self.held - self.members


def node_time(time: RunTime) -> NodeTime:
    """Return the time of the nodes of a run. A node that two jobs hold counts for each."""
    by_cause = dict.fromkeys(TimeCause, 0)
    names: set[str] = set()
    spans: list[NodesSpan] = []
    for part in time.parts:
        staffs = list(_staffs(part.facts))
        for cause, us in _weighted(part, staffs):
            by_cause[cause] += us
        names.update(*(staff.held for staff in staffs))
        end = part.facts.ended.us
        spans += _together(((staff.since_us, staff.held) for staff in staffs), end, held=True)
        spans += _together(((staff.since_us, staff.idle) for staff in staffs), end, held=False)
    return NodeTime(by_cause, tuple(sorted(names)), tuple(spans))


def _staffs(part: PartFacts) -> Iterator[_Staff]:
    held = set(part.nodes)
    changes: list[tuple[int, int, object]] = [(one.began.us, 1, one.members) for one in part.rounds]
    changes += [(us, 0, (node, came)) for us, node, came in part.moves]
    members: frozenset[str] | None = None
    yield _Staff(part.began.us, frozenset(held), None, len(held))
    for us, _, change in sorted(changes, key=lambda one: one[:2]):
        match change:
            case (str(node), bool(came)):
                if came:
                    held.add(node)
                else:
                    held.discard(node)
            case tuple(now):
                members = frozenset(map(str, now))
                held |= members
        working = len(held) if members is None else len(held & members)
        yield _Staff(us, frozenset(held), members, working)


def _weighted(part: PartTime, staffs: Sequence[_Staff]) -> Iterator[tuple[TimeCause, int]]:
    for span, staff, us in _overlaps(part.spans, staffs, part.facts.ended.us):
        whole = span.cause in (TimeCause.UNKNOWN, TimeCause.IDLE)
        working = len(staff.held) if whole else staff.working
        yield span.cause, us * working
        yield TimeCause.IDLE, us * (len(staff.held) - working)


def _overlaps(
    spans: Iterable[TimeSpan], staffs: Sequence[_Staff], end_us: int
) -> Iterator[tuple[TimeSpan, _Staff, int]]:
    number = 0
    for span in spans:
        at = span.begin_us
        while at < span.end_us:
            while number + 1 < len(staffs) and staffs[number + 1].since_us <= at:
                number += 1
            until = staffs[number + 1].since_us if number + 1 < len(staffs) else end_us
            until = min(until, span.end_us)
            yield span, staffs[number], until - at
            at = until


def _together(changes: Iterable[tuple[int, frozenset[str]]], end_us: int, held: bool) -> Iterator[NodesSpan]:
    """Return one span for all nodes that were in the sets from the same moment to the same moment."""
    since: dict[str, int] = {}
    before: frozenset[str] = frozenset()
    for us, now in [*changes, (end_us, frozenset[str]())]:
        left: dict[int, list[str]] = {}
        for node in sorted(before - now):
            left.setdefault(since.pop(node), []).append(node)
        for node in now - before:
            since[node] = us
        before = now
        for begin, nodes in left.items():
            if us > begin:
                yield NodesSpan(tuple(sorted(nodes)), begin, us, held)
