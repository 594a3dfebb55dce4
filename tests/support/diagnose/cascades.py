"""Cascades of errors as machines make them: one fault, and what other ranks, kernels, networks and clocks do about it.

Ranks in tensor-, pipeline- and data-parallel groups run a program of collective calls. One of them meets a fault. The
others go on until a call cannot end. Then libraries act as gloo, NCCL and MPI do: a neighbour sees its connection
close and raises, or hears nothing and waits for a watchdog; processes that end close their own connections later.
Agents note ends on the clocks of their nodes, texts and reports get lost, and a controller stops all in the end.

Nothing here uses the judge's rules: only mechanisms are drawn.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from resilio_hpc.diagnose.cascade.clocks import ClockBounds
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight

LIBRARIES = ("gloo", "nccl", "mpi")
NEVER = float("inf")
FAULTS = (
    "killed", "out of memory", "exception", "segfault", "abort", "data", "gpu", "network", "node", "early exit", "two",
    "program",
)  # fmt: skip
WATCHDOG_S = 600.0


@dataclass(frozen=True)
class Report:
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
    oom_killed: bool = False
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
    reports: list[Report]
    clocks: dict[str, ClockBounds]
    addresses: dict[str, str]
    now: float
    unix_ahead_s: float


@dataclass
class _Rank:
    number: int
    node: int
    groups: dict[str, tuple[int, ...]]  # kind → its members, in the order of their numbers
    entered: dict[str, int] = field(default_factory=dict)
    slot: int = 0
    stuck_in: str = ""
    stuck_since: float = NEVER
    ended: float = NEVER  # when its end was noted
    closed: float = NEVER  # when its connections closed


class _World:
    """One run of one program, up to and after its fault."""

    def __init__(self, fault: str, size: int, seed: int) -> None:
        draw = self.draw = random.Random(f"{fault} {size} {seed}")
        self.fault, self.size = fault, size
        self.library = draw.choices(LIBRARIES, (3, 6, 1))[0]
        if fault in ("gpu", "network"):
            self.library = "nccl" if fault == "gpu" else draw.choice(LIBRARIES[:2])
        self.per_node = min(8, size // 2)
        self.tensor = draw.choice([1, 2, 4, 8]) if size > 8 else draw.choice([1, 2])
        self.stages = draw.choice([1, 2, 4]) if size > 8 else draw.choice([1, 2])
        self.ranks = [_Rank(number, number // self.per_node, self._groups(number)) for number in range(size)]
        self.t0 = 1000.0  # true time in seconds; the controller's monotonic clock shows it
        self.reports: list[Report] = []
        self.origins: set[int] = set()
        self.nodes: set[str] = set()
        self.none_is_right = False
        self.dead_nodes: set[int] = set()
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
            "world": tuple(range(self.size)),
        }
        return {name: members for name, members in groups.items() if len(members) > 1}

    def _make_clocks(self) -> None:
        """Draw clocks that nobody set right, and let the agents' heartbeats tell of them over unequal ways."""
        draw = self.draw
        spread_s = draw.choice([0.0005, 0.02, 0.3, 3.0])
        nodes = self.size // self.per_node
        self.unix_ahead_s = 1.7e9
        self.offset = [draw.gauss(0.0, spread_s) for _ in range(nodes)]
        self.drift = [draw.gauss(0.0, 30e-6) for _ in range(nodes)]
        self.jump = [(self.t0 + draw.uniform(-300, 60), draw.gauss(0, spread_s)) if draw.random() < 0.01 else (NEVER, 0.0)
                     for _ in range(nodes)]  # fmt: skip
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
        culprits = self._culprits()
        compute_s = draw.choice([0.005, 0.05, 0.5])
        before = draw.randint(100, 100000)
        for rank in self.ranks:
            rank.entered = {kind: before + len(kind) * 7 for kind in rank.groups}
        arrived = [self.t0 - draw.random() * compute_s for _ in self.ranks]
        stops = {number: NEVER for number in culprits}
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
            waits_for = [n for n in members if stuck[n] or n in dying]
            ends = max(arrived[n] for n in members) + 0.001
            held: list[int] = []
            for place, number in enumerate(members):
                if stuck[number]:
                    continue
                # a stage of the pipeline waits for the one before it; others for all of their group
                absent = [members[place - 1]] if kind == "pp" and place > 0 else [] if kind == "pp" else waits_for
                if any(stuck[n] or n in dying for n in absent):
                    if number not in dying:
                        self.ranks[number].stuck_in, self.ranks[number].stuck_since = kind, arrived[number]
                    held.append(number)
                elif number in dying:
                    held.append(number)
                else:
                    arrived[number] = ends if kind != "pp" else max(arrived[number], arrived[members[place - 1]]) + 0.001
            for number in held:
                stuck[number] = True

    def _culprits(self) -> list[int]:
        draw = self.draw
        if self.fault == "two":
            first = draw.randrange(self.size)
            others = [n for n in range(self.size) if self.ranks[n].node != self.ranks[first].node]
            return [first, draw.choice(others)]
        if self.fault == "program":
            count = draw.choice([self.size, max(2, self.size // 2)])
            return sorted(draw.sample(range(self.size), count))
        if self.fault == "node":
            node = draw.randrange(self.size // self.per_node)
            return [rank.number for rank in self.ranks if rank.node == node]
        return [draw.randrange(self.size)]

    # -- the fault ---------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Let the culprits meet their fault."""
        fault, draw = self.fault, self.draw
        if fault == "node":
            at = min(self.stops.values())
            (node,) = {self.ranks[number].node for number in self.stops}
            self.dead_nodes.add(node)
            self.nodes = {self.node_name(node)}
            self.origins = set(self.stops)
            resets = draw.random() < 0.2  # it reboots, and answers its peers with resets
            for number in self.stops:
                self.ranks[number].ended = at
                self.ranks[number].closed = at + draw.uniform(20, 120) if resets else NEVER
            return
        kinds = {"two": ["killed", "exception", "segfault", "gpu", "data"], "program": ["exception"]}
        for number, at in self.stops.items():
            self._end_of(number, at, draw.choice(kinds.get(fault, [fault])))
        self.origins = set(self.stops)
        if fault == "two":  # the one that came first began; within a blink none can say
            (a, at_a), (b, at_b) = self.stops.items()
            self.origins = {a if at_a <= at_b else b}
            self.none_is_right = True
        if fault == "program":
            self.none_is_right = True

    def _end_of(self, number: int, at: float, fault: str) -> None:
        """Let one rank meet a fault at a true time."""
        draw = self.draw
        if fault in ("killed", "out of memory"):
            seen = fault == "out of memory" and draw.random() < 0.7
            self._dies(number, at, 9, oom_killed=seen)
        elif fault == "segfault":
            dumps_s = draw.choice([0.0, draw.uniform(0.5, 8)])
            self._dies(number, at + dumps_s, draw.choice([11, 11, 7, 4]))
        elif fault == "abort":  # an assertion of a C++ library
            self._dies(number, at + draw.uniform(0, 0.5), 6, log=draw.choice(_ABORTS))
        elif fault == "early exit":
            lasts_s = draw.lognormvariate(-2, 1)
            self._note(number, at + lasts_s, at + lasts_s * draw.random(), "early_exit", exit_code=0,
                       message="exited with 0 after 41 steps, before training was finished")  # fmt: skip
        elif fault == "network":
            self._cut_off(number, at)
        else:
            texts = {"exception": _EXCEPTIONS, "data": _DATA, "gpu": _GPU}[fault]
            self._raises(number, at, draw.choice(texts if self.fault != "program" else _EXCEPTIONS[:1]), own=True)

    def _cut_off(self, number: int, at: float) -> None:
        """Cut a rank's network card off: it and the neighbours in its rings see broken transfers."""
        draw, rank = self.draw, self.ranks[number]
        found = sorted({self.ranks[n].node for n in self._neighbours(number)} - {rank.node})
        peers = found or [rank.node]
        self._breaks.append((at + draw.uniform(2, 20), number, self.address(draw.choice(peers))))
        for other in self._neighbours(number):
            if self.ranks[other].node != rank.node and draw.random() < 0.8:
                self._breaks.append((at + draw.uniform(2, 20), other, self.address(rank.node)))

    def _judge_breaks(self, number: int, seen: list[tuple[float, int]]) -> None:
        """Set what can be known: of one broken link both ends look the same."""
        before = [at for at, other in seen if other != number and at < self.ranks[number].ended]
        self.none_is_right = len(before) < 2

    def _fails(self, number: int, at: float, text: str) -> None:
        """Let a rank end by a library's error: NCCL's watchdog mostly ends the process, and writes why into its log."""
        if self.library == "nccl" and self.draw.random() < 0.6:
            said = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank {number}] Process group watchdog thread terminated with exception: {text.partition(': ')[2]}"  # noqa: E501
            self._dies(number, at + self.draw.uniform(0, 2), 6, log=said)
        else:
            self._raises(number, at, text)

    def _broken_link(self, address: str) -> str:
        if self.library == "gloo":
            port = self.draw.randint(30000, 60000)
            return f"RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [{address}]:{port}: Connection timed out"  # noqa: E501
        return (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2027,"
            " remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed"
            " possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB : Got"
            f" completion from peer {address}<{self.draw.randint(30000, 60000)}> with status=12 opcode=0 len=0"
            " vendor err 129 (Recv)"
        )

    def _neighbours(self, number: int) -> list[int]:
        """Return the ranks with which it has a connection in the rings of its groups."""
        found = []
        for kind, members in self.ranks[number].groups.items():
            place = members.index(number) if kind != "world" else number
            found += [members[place - 1], members[(place + 1) % len(members)]]
        return [n for n in dict.fromkeys(found) if n != number]

    # -- how processes end -------------------------------------------------------------------------------------

    def _dies(self, number: int, at: float, signal: int, oom_killed: bool = False, message: str = "", traceback: str = "",
              noted: float | None = None, log: str = "") -> None:  # fmt: skip
        """Let a signal end a process. The kernel frees its GPU and closes its connections, then its parent hears."""
        reaped = at + self.draw.lognormvariate(-3, 1.2) + (self.draw.lognormvariate(-0.9, 0.8) if self.library == "nccl" else 0)
        name = {9: "SIGKILL", 11: "SIGSEGV", 7: "SIGBUS", 4: "SIGILL", 6: "SIGABRT", 15: "SIGTERM"}[signal]
        closed = at + (reaped - at) * self.draw.random()
        self._note(number, noted or reaped, closed, "signal", signal, None, message or f"killed by {name}", traceback,
                   oom_killed, log)  # fmt: skip

    def _raises(self, number: int, at: float, text: str, own: bool = False) -> None:
        """Let a rank raise: it notes the error, runs its handlers, and closes its connections when it ends."""
        draw = self.draw
        ends = at + draw.lognormvariate(-1.5, 1.5)
        place = ("/job/train.py", draw.randint(10, 400)) if own and "DistBackend" not in text and "gloo" not in text else (
            "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810)  # fmt: skip
        traceback = _traceback(place, text)
        chance = draw.random()
        if own and self.fault == "program":
            traceback = _traceback(("/job/train.py", 88), text)
        if not own and chance < 0.05:  # the program caught it, and raised its own
            text = "RuntimeError: training step failed, giving up"
            traceback = traceback + "\n\nThe above exception was the direct cause of the following exception:\n\n"
            traceback += _traceback(("/job/train.py", 301), text)
        elif not own and chance < 0.09:  # its teardown crashes
            self._dies(number, ends, draw.choice([6, 11]), message=text, traceback=traceback, noted=at + 0.002)
            return
        elif chance < 0.13:  # the word is lost: the process was executed without a handler, or left by os._exit
            log = text if draw.random() < 0.5 else ""
            self._note(number, ends, ends, "exit", exit_code=1, message="exit code 1", log=log)
            return
        elif chance < 0.18:
            text = text[: draw.randint(20, 120)]
        self._note(number, at + 0.002, ends, "exit", exit_code=1, message=text, traceback=traceback)

    def _note(self, number: int, noted: float, closed: float, kind: str, signal: int | None = None,
              exit_code: int | None = None, message: str = "", traceback: str = "", oom_killed: bool = False,
              log: str = "") -> None:  # fmt: skip
        rank = self.ranks[number]
        if rank.ended < NEVER:
            return
        rank.ended, rank.closed = noted, closed
        groups = tuple(
            GroupSight(self._group_id(kind_, members), self.library, members.index(number) if kind_ != "world" else number,
                       len(members), rank.entered[kind_])
            for kind_, members in rank.groups.items() if kind_ != "pp"
        )  # fmt: skip
        node = self.node_name(rank.node)
        when = self.clock(rank.node, noted)
        self.reports.append(Report(number, node, kind, when, signal, exit_code, message, traceback, self._kept(log),
                                   oom_killed, groups))  # fmt: skip

    def _kept(self, log: str) -> str:
        """Return the end of a log as it is found: nothing where its buffer was not written, or cut off."""
        chance = self.draw.random()
        return "" if chance < 0.1 else log[: self.draw.randint(20, 200)] if chance < 0.15 else log

    def _group_id(self, kind: str, members: tuple[int, ...]) -> int:
        return 1 + ("tp", "dp", "pp", "world").index(kind) + 4 * members[0]

    # -- how others notice -------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Let ends spread: over connections that close, or by watchdogs where none does."""
        draw = self.draw
        queue: list[tuple[float, int, int]] = []  # when, the rank that notices, the rank that it notices
        told: set[tuple[int, int]] = set()

        def closes(number: int) -> None:
            rank = self.ranks[number]
            if rank.closed == NEVER:
                return
            for other in self._neighbours(number):
                if (number, other) not in told and self.ranks[other].ended == NEVER:
                    told.add((number, other))
                    heapq.heappush(queue, (rank.closed + self._notices_s(), other, number))

        for rank in self.ranks:
            if rank.ended < NEVER:
                closes(rank.number)
            else:
                since = rank.stuck_since if rank.stuck_since < NEVER else self.t0 + draw.uniform(0, 5)
                heapq.heappush(queue, (since + WATCHDOG_S + draw.expovariate(1 / 2.0), rank.number, -1))
        if self.library == "mpi" and self.reports:  # mpirun or srun ends the step
            first = min(report_end for report_end in (self.ranks[n].ended for n in range(self.size)) if report_end < NEVER)
            for rank in self.ranks:
                heapq.heappush(queue, (first + draw.uniform(0.005, 0.3), rank.number, -2))
        for number_of_break, (when, number, _) in enumerate(self._breaks):
            heapq.heappush(queue, (when, number, -10 - number_of_break))
        broken: list[tuple[float, int]] = []
        while queue:
            at, number, peer = heapq.heappop(queue)
            rank = self.ranks[number]
            if rank.ended < NEVER:
                continue
            waits = rank.stuck_since if rank.stuck_since < NEVER else at
            at = max(at, waits + 0.001) if peer > -10 else at
            if peer >= 0 and self.library == "nccl" and draw.random() < 0.25:
                continue  # the transport does not see it: the watchdog will
            if peer <= -10:
                self._fails(number, at, self._broken_link(self._breaks[-10 - peer][2]))
                broken.append((at, number))
            else:
                self._echo(number, at, peer)
            closes(number)
        if self.fault == "network":
            self._judge_breaks(*self.origins, broken)

    def _notices_s(self) -> float:
        draw = self.draw
        if self.library == "nccl":
            return draw.uniform(0.01, 2.0)
        return draw.lognormvariate(-6, 1)

    def _echo(self, number: int, at: float, peer: int) -> None:
        draw = self.draw
        if peer == -2:
            said = "killed together with its MPI step"  # the launcher of MPI ranks says so of those that srun ended
            self._note(number, at + 0.02, at, "exit", exit_code=1, message=said)
            return
        if peer == -1:
            seen = self.ranks[number].entered.get("world", 77)
            text = _WATCHDOG.format(rank=number, seq=seen) if self.library == "nccl" else draw.choice(_TIMEOUTS)
        else:
            texts = _NCCL if self.library == "nccl" else _GLOO
            text = draw.choice(texts).format(address=self.address(self.ranks[peer].node), port=draw.randint(30000, 60000))
        self._fails(number, at, text)

    # -- what the controller gets ------------------------------------------------------------------------------

    def collect(self, complete: bool) -> Cascade:
        """Return what is known when a controller judges: all ends, or those of about the first second."""
        draw = self.draw
        lost = [r for r in self.reports if draw.random() < (0.01 if r.rank in self.origins else 0.03)]
        reports = [report for report in self.reports if report not in lost]
        ends = sorted(self.ranks[report.rank].ended for report in reports)
        known_lost = self.t0 + draw.uniform(8, 14) if self.dead_nodes else NEVER
        judged = (ends[-1] if ends else known_lost) + 1.0
        if not complete:
            first = min([*ends[:1], known_lost])
            judged = first + draw.uniform(1.0, 1.2)
            reports = [report for report in reports if self.ranks[report.rank].ended <= judged]
        if self.dead_nodes and (known_lost <= judged or complete):
            (node,) = self.dead_nodes
            heard = min(self.stops.values()) - draw.uniform(0, 1.25)
            reports.append(Report(-1, self.node_name(node), "node_lost", heard + self.unix_ahead_s))
        draw.shuffle(reports)
        if self.fault == "two":  # of the two, those are known that were heard of
            known = self.origins & {report.rank for report in reports}
            self.origins = known or set(self.stops) & {report.rank for report in reports} or self.origins
        now = max(judged, self.t0)
        self.exchange(min(now, self.t0 + 30))
        addresses = {self.address(node): self.node_name(node) for node in range(self.size // self.per_node)}
        return Cascade(self.fault, self.size, self.library, complete, self.origins, self.nodes, self.none_is_right,
                       reports, self.clocks, addresses, now, self.unix_ahead_s)  # fmt: skip


def cascade(fault: str, size: int, seed: int, complete: bool | None = None) -> Cascade:
    """Return one case of a kind of fault, the same for the same seed."""
    world = _World(fault, size, seed)
    world.run()
    world.strike()
    world.spread()
    return world.collect(bool(seed % 2) if complete is None else complete)


# -- words as libraries write them ---------------------------------------------------------------------------------

_EXCEPTIONS = [
    "ValueError: loss is not finite at step 412",
    "KeyError: 'attention_mask'",
    "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB",
    "AssertionError",
    "model.CheckFailed: router entropy collapsed",
    "OSError: [Errno 28] No space left on device",
]
_DATA = [
    "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f31c8>",
    "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted or it is not one.",
    "RuntimeError: DataLoader worker (pid 48121) is killed by signal: Killed.",
    "OSError: [Errno 5] Input/output error: '/data/shard-00412.tar'",
    "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 5",
]
_GPU = [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",  # noqa: E501
    "RuntimeError: CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",  # noqa: E501
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
]
_GLOO = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [{address}]:{port}",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [{address}]:{port}: Connection reset by peer",  # noqa: E501
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:446] Write error [{address}]:{port}: Broken pipe",
    "RuntimeError: Application timeout caused pair closure",
]
_NCCL = [
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer {address}<{port}>",  # noqa: E501
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2027, unhandled system error, NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nSocket recv failed while polling for opId=0x7f6d",  # noqa: E501
]
_NCCL.append(
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB : Got completion from peer {address}<{port}> with status=12 opcode=0 len=0 vendor err 129 (Recv)"  # noqa: E501
)
_ABORTS = [
    "python: /src/fused/kernel.cpp:88: void launch(const Params&): Assertion `params.rows > 0' failed.",
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert triggered",
    "free(): invalid pointer",
]
_WATCHDOG = "torch.distributed.DistBackendError: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8388608, NumelOut=8388608, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."  # noqa: E501
_TIMEOUTS = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",  # noqa: E501
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:137] Timed out waiting 1800000ms for send operation to complete",  # noqa: E501
]


def _traceback(place: tuple[str, int], text: str) -> str:
    file, line = place
    frames = [("/job/train.py", 120), ("/job/train.py", 77), place]
    said = "".join(f'  File "{at}", line {number}, in step\n    x = f(x)\n' for at, number in frames[:2] if at != file)
    return f'Traceback (most recent call last):\n{said}  File "{file}", line {line}, in run\n    y = f(x)\n{text}'


Generator = Callable[[str, int, int], Cascade]
