"""Machines and a program for simulated cascades: nodes whose clocks are wrong, ranks in groups, collective calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from resilio_hpc.diagnose.cascade.clocks import ClockBounds
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight

LIBRARIES = ("gloo", "nccl", "mpi")
NEVER = float("inf")


@dataclass(frozen=True)
class EndReport:
    """An end as an agent tells of it; ``time`` is of its node's clock, but for a lost node: of the controller's."""

    rank: int
    node: str
    kind: str
    time: float
    signal: int | None = None
    exit_code: int | None = None
    message: str = ""
    traceback: str = ""
    log: str = ""
    groups: tuple[GroupSight, ...] = ()


@dataclass
class Cascade:
    """One case. ``origins``: ranks that are a right answer; ``nodes``: nodes that are.

    ``none_is_right``: "no primary cause" is right, too. ``now``: the controller's monotonic time of judging;
    ``unix_ahead_s``: what is added to it for Unix seconds.
    """

    fault: str
    size: int
    library: str
    complete: bool
    origins: set[int]
    nodes: set[str]
    none_is_right: bool
    reports: list[EndReport]
    clocks: dict[str, ClockBounds]
    addresses: dict[str, str]
    now: float
    unix_ahead_s: float


@dataclass
class SimulatedRank:
    number: int
    node: int
    groups: dict[str, tuple[int, ...]]  # kind → its members, in the order of their numbers
    entered: dict[str, int] = field(default_factory=dict)
    slot: int = 0
    stuck_in: str = ""
    stuck_since: float = NEVER
    ended: float = NEVER  # when its end was noted
    closed: float = NEVER  # when its connections closed


class Machines:
    """Nodes with their clocks, and ranks that run a program up to a fault, and then as far as they can."""

    def __init__(self, fault: str, size: int, seed: int) -> None:
        draw = self.draw = random.Random(f"{fault} {size} {seed}")
        self.fault, self.size = fault, size
        self.library = draw.choices(LIBRARIES, (3, 6, 1))[0]
        if fault in ("gpu", "network"):
            self.library = "nccl" if fault == "gpu" else draw.choice(LIBRARIES[:2])
        self.per_node = min(8, size // 2)
        self.tensor = draw.choice([1, 2, 4, 8]) if size > 8 else draw.choice([1, 2])
        self.stages = draw.choice([1, 2, 4]) if size > 8 else draw.choice([1, 2])
        self._all = tuple(range(size))
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.ranks = [SimulatedRank(number, number // self.per_node, self._groups(number)) for number in range(size)]
        self.t0 = 1000.0  # true time in seconds; the controller's monotonic clock shows it
        self.reports: list[EndReport] = []
        self.origins: set[int] = set()
        self.nodes: set[str] = set()
        self.none_is_right = False
        self.dead_nodes: set[int] = set()
        self._broken: set[int] = set()  # ranks whose transfer failed
        self._breaks: list[tuple[float, int, str]] = []  # when, which rank's transfer fails, to which address
        self._make_clocks()

    # -- the machines ------------------------------------------------------------------------------------------

    def node_name(self, node: int) -> str:
        return f"n{node + 1:03d}"

    def address(self, node: int) -> str:
        return f"10.{node // 250}.{node % 250}.7"

    def _groups(self, number: int) -> dict[str, tuple[int, ...]]:
        """Megatron's order: tensor, data, pipeline."""
        tensor, stages = self.tensor, self.stages
        data = self.size // tensor // stages
        t, d, p = number % tensor, number // tensor % data, number // tensor // data
        groups = {
            "tp": tuple(i + tensor * (d + data * p) for i in range(tensor)),
            "dp": tuple(t + tensor * (i + data * p) for i in range(data)),
            "pp": tuple(t + tensor * (d + data * i) for i in range(stages)),
            "world": self._all,
        }
        return {name: self._shared.setdefault(members, members) for name, members in groups.items() if len(members) > 1}

    def _make_clocks(self) -> None:
        """Draw clocks that nobody set right, and let the agents' heartbeats tell of them over unequal ways."""
        draw = self.draw
        spread_s = draw.choice([0.0005, 0.02, 0.3, 3.0])
        nodes = self.size // self.per_node
        self.unix_ahead_s = 1.7e9
        self.offset = [draw.gauss(0.0, spread_s) for _ in range(nodes)]
        self.drift = [draw.gauss(0.0, 30e-6) for _ in range(nodes)]
        jumps = [(self.t0 + draw.uniform(-300, 60), draw.gauss(0, spread_s)) for _ in range(nodes)]
        self.jump = [jump if draw.random() < 0.01 else (NEVER, 0.0) for jump in jumps]
        congested = draw.random() < 0.15
        self.clocks: dict[str, ClockBounds] = {}
        self._ways = [(draw.uniform(3e-5, 3e-4), draw.uniform(3e-5, 3e-4)) for _ in range(nodes)]
        self._queue_s = draw.choice([1e-4, 1e-3]) if not congested else 0.05

    def clock(self, node: int, at: float) -> float:
        """Return what a node's Unix clock shows."""
        jumped = self.jump[node][1] if at >= self.jump[node][0] else 0.0
        return at + self.unix_ahead_s + self.offset[node] + self.drift[node] * (at - self.t0) + jumped

    def exchange(self, until: float) -> None:
        """Send heartbeats and their answers up to a time."""
        draw = self.draw
        for node in range(self.size // self.per_node):
            bounds, stamp, got = ClockBounds(), None, 0.0
            at = until - draw.uniform(15, 60)
            period = draw.uniform(0.6, 1.25)
            while at < until and not (node in self.dead_nodes and at > self.t0):
                there = at + self._ways[node][0] + draw.expovariate(1 / self._queue_s)
                if stamp is not None and there < until:
                    bounds.heard(self.clock(node, at), stamp + (at - got), there)
                stamp, got = there, there + self._ways[node][1] + draw.expovariate(1 / self._queue_s)
                at = max(at + period, got)
            self.clocks[self.node_name(node)] = bounds

    # -- the program -------------------------------------------------------------------------------------------

    def program(self) -> list[str]:
        """Return the kinds of the calls of two steps; a rank without such a group skips them."""
        step: list[str] = []
        for _ in range(self.draw.randint(1, 3)):
            step += ["pp", "tp", "tp"]
        return ([*step, "dp", "world"] if self.draw.random() < 0.7 else [*step, "dp"]) * 2

    def run(self) -> None:
        """Run until no rank can go on. The fault comes somewhere in the first of two steps."""
        draw = self.draw
        calls = [kind for kind in self.program() if kind in self.ranks[0].groups] or ["world"] * 4
        at_call = draw.randrange(max(1, len(calls) // 2))
        inside = draw.random() < 0.35 and self.fault not in ("exception", "data", "early exit", "program")
        culprits = self.culprits()
        compute_s = draw.choice([0.005, 0.05, 0.5])
        before = draw.randint(100, 100000)
        for rank in self.ranks:
            rank.entered = {kind: before + len(kind) * 7 for kind in rank.groups}
        arrived = [self.t0 - draw.random() * compute_s for _ in self.ranks]
        stops = dict.fromkeys(culprits, NEVER)
        stuck = [False] * self.size
        for index, kind in enumerate(calls):
            for number, rank in enumerate(self.ranks):
                if stuck[number]:
                    continue
                due = arrived[number] + compute_s * draw.lognormvariate(0, 0.1)
                if number in stops and index == at_call and not inside:
                    stops[number] = arrived[number] + draw.random() * (due - arrived[number])
                    stuck[number] = True
                    continue
                arrived[number] = due
                rank.slot = index
                rank.entered[kind] += 1
                if number in stops and index == at_call:  # in the call
                    stops[number] = due + draw.random() * 0.002
            self._meet(kind, arrived, stuck, stops if inside and index == at_call else {})
        self.stops = stops
        if self.library == "nccl":  # the host runs ahead of the GPU
            for number, rank in enumerate(self.ranks):
                ahead = 0 if number in stops and not inside else draw.choice([0, 0, 1, 2, 4])
                for kind in calls[rank.slot + 1 : rank.slot + 1 + ahead]:
                    rank.entered[kind] += 1

    def _meet(self, kind: str, arrived: list[float], stuck: list[bool], dying: dict[int, float]) -> None:
        """Let all groups of a kind end their call, but those with a member that did not come, or that dies in it."""
        done: set[int] = set()
        for rank in self.ranks:
            members = rank.groups[kind]
            if members[0] in done:
                continue
            done.add(members[0])
            halted = any(stuck[n] or n in dying for n in members)
            ends = max(arrived[n] for n in members) + 0.001
            held: list[int] = []
            for place, number in enumerate(members):
                if stuck[number]:
                    continue
                if kind == "pp":  # a stage of the pipeline waits for the one before it; others for all of their group
                    before = members[place - 1]
                    halted = place > 0 and (stuck[before] or before in dying)
                if halted:
                    if number not in dying:
                        self.ranks[number].stuck_in, self.ranks[number].stuck_since = kind, arrived[number]
                    held.append(number)
                elif number in dying:
                    held.append(number)
                elif kind == "pp":
                    arrived[number] = max(arrived[number], arrived[members[place - 1]]) + 0.001
                else:
                    arrived[number] = ends
            for number in held:
                stuck[number] = True

    def culprits(self) -> list[int]:
        """Return the ranks that meet the fault."""
        raise NotImplementedError
