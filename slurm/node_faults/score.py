"""From remembered faults to a score per node: how much of each fault still counts. Pure.

A fault counts half after each half-life. A fault that many nodes had at once is shared among them. Several faults of
one node within a moment, or again and again in one run, count as few.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resilio_hpc.slurm.node_faults.fault import FORGOTTEN, NodeFault
from resilio_hpc.slurm.node_faults.policy import FaultPolicy

CLOCK_S = 86400.0  # a fault further in the future than this has no plausible time


@dataclass(frozen=True)
class Counted:
    """A fault and how much of it counts now."""

    fault: NodeFault
    worth: float


@dataclass(frozen=True)
class NodeScore:
    """A node's score. ``counted``: the newest first."""

    node: str
    score: float
    counted: tuple[Counted, ...]

    @property
    def devices(self) -> dict[str, float]:
        """Return device → its part of the score; "" for faults of no single device."""
        parts: dict[str, float] = defaultdict(float)
        for one in self.counted:
            parts[one.fault.device] += one.worth
        return dict(parts)

    @property
    def summary(self) -> str:
        """Return ``score 2.4: node-lost 2, health-fatal gpu-xid 1``: the counted faults, by kind and check."""
        numbers = Counter(f"{one.fault.kind} {one.fault.check}".strip() for one in self.counted)
        return f"score {self.score:.2f}: {', '.join(f'{name} {count}' for name, count in numbers.most_common())}"


def scores(faults: Iterable[NodeFault], now: float, policy: FaultPolicy, cluster: str = "") -> list[NodeScore]:
    """Return the nodes of ``cluster`` ("": of all) with a score above 0, the worst first. ``now``: Unix seconds."""
    known = {fault.key: fault for fault in faults if _is_about(fault, cluster) and fault.time <= now + CLOCK_S}
    events = sorted((fault for fault in known.values() if fault.kind != FORGOTTEN), key=lambda fault: fault.time)
    forgotten: dict[str, float] = {}
    for fault in known.values():
        if fault.kind == FORGOTTEN:
            forgotten[fault.node] = max(fault.time, forgotten.get(fault.node, 0.0))
    shares = _Shares(events, policy)
    found: dict[str, list[Counted]] = defaultdict(list)
    for fault in _once(events, policy):
        worth = policy.kinds[fault.kind].counts * shares.of(fault)
        worth *= 0.5 ** (max(0.0, now - fault.time) / policy.half_life_s)
        if worth > 0 and fault.time > forgotten.get(fault.node, -1.0):
            found[fault.node].append(Counted(fault, worth))
    made = [
        NodeScore(node, sum(one.worth for one in counted), tuple(reversed(counted))) for node, counted in found.items()
    ]
    return sorted(made, key=lambda one: (-one.score, one.node))


def _is_about(fault: NodeFault, cluster: str) -> bool:
    return not cluster or fault.cluster in ("", cluster)


def _once(events: Sequence[NodeFault], policy: FaultPolicy) -> list[NodeFault]:
    """Return the faults without repetitions; ``events`` by time."""
    kept: list[NodeFault] = []
    last: dict[tuple[str, str, str], float] = {}
    in_run: Counter[tuple[str, str, str]] = Counter()
    for fault in events:
        kind = policy.kinds.get(fault.kind)
        if kind is None:  # of a newer version, or no longer in the site's policy
            continue
        same = (fault.node, fault.kind, fault.check)
        if same in last and fault.time - last[same] < kind.once_per_s:
            continue
        of_run = (fault.run, fault.node, fault.kind)
        if fault.run and in_run[of_run] >= policy.most_per_run:
            continue
        last[same] = fault.time
        in_run[of_run] += 1
        kept.append(fault)
    return kept


class _Shares:
    """The share of a fault that is a node's own: faults of several nodes at one time have a common cause."""

    def __init__(self, events: Sequence[NodeFault], policy: FaultPolicy) -> None:
        self._policy = policy
        self._same: dict[tuple[str, str, str], list[NodeFault]] = defaultdict(list)
        for fault in events:
            self._same[(fault.run, fault.kind, fault.check)].append(fault)
        self._times = {key: [fault.time for fault in group] for key, group in self._same.items()}

    def of(self, fault: NodeFault) -> float:
        key = (fault.run, fault.kind, fault.check)
        times, within = self._times[key], self._policy.shared_within_s
        first, last = bisect_left(times, fault.time - within), bisect_right(times, fault.time + within)
        nodes = len({other.node for other in self._same[key][first:last]})
        return 1.0 / nodes if nodes >= self._policy.shared_nodes else 1.0
