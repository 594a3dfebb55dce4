"""Cascades of errors as machines make them: one fault, and what other ranks, kernels, networks and clocks do about it.

Ranks in tensor-, pipeline- and data-parallel groups run a program of collective calls. One of them meets a fault. The
others go on until a call cannot end. Then libraries act as gloo, NCCL and MPI do: a neighbour sees its connection
close and raises, or hears nothing and waits for a watchdog; processes that end close their own connections later.
Agents note ends on the clocks of their nodes, texts and reports get lost, and a controller stops all in the end.

Nothing here uses the judge's rules: only mechanisms are drawn.
"""

from __future__ import annotations

import heapq

from resilio_hpc.diagnose.hangs.rank_sight import GroupSight
from tests.support.diagnose.library_errors import (
    ABORTS,
    DATA,
    EXCEPTIONS,
    GLOO,
    GPU,
    KERNEL,
    NCCL,
    TIMEOUTS,
    WATCHDOG,
    traceback_of,
)  # fmt: skip
from tests.support.diagnose.machines import NEVER, Cascade, EndReport, Machines

FAULTS = (
    "killed", "out of memory", "exception", "segfault", "abort", "data", "gpu", "network", "node", "early exit", "two",
    "program",
)  # fmt: skip
WATCHDOG_S = 600.0


class _World(Machines):
    """One run of one program, up to and after its fault."""

    def culprits(self) -> list[int]:
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
            self._dies(number, at, 9, message=KERNEL if seen else "")
        elif fault == "segfault":
            dumps_s = draw.choice([0.0, draw.uniform(0.5, 8)])
            self._dies(number, at + dumps_s, draw.choice([11, 11, 7, 4]))
        elif fault == "abort":  # an assertion of a C++ library
            self._dies(number, at + draw.uniform(0, 0.5), 6, log=draw.choice(ABORTS))
        elif fault == "early exit":
            lasts_s = draw.lognormvariate(-2, 1)
            self._note(number, at + lasts_s, at + lasts_s * draw.random(), "early_exit", exit_code=0,
                       message="exited with 0 after 41 steps, before training was finished")  # fmt: skip
        elif fault == "network":
            self._cut_off(number, at)
        else:
            texts = {"exception": EXCEPTIONS, "data": DATA, "gpu": GPU}[fault]
            self._raises(number, at, draw.choice(texts if self.fault != "program" else EXCEPTIONS[:1]), own=True)

    def _cut_off(self, number: int, at: float) -> None:
        """Cut a rank's network card off: it and the neighbours in its rings see broken transfers."""
        draw, rank = self.draw, self.ranks[number]
        found = sorted({self.ranks[n].node for n in self._neighbours(number)} - {rank.node})
        peers = found or [rank.node]
        self._breaks.append((at + draw.uniform(2, 20), number, self.address(draw.choice(peers))))
        for other in self._neighbours(number):
            if self.ranks[other].node != rank.node and draw.random() < 0.8:
                self._breaks.append((at + draw.uniform(2, 20), other, self.address(rank.node)))

    def _one_link(self, reports: list[EndReport]) -> bool:
        """Return whether one broken link is all that reports show: of that, both ends look the same."""
        (number,) = self.origins
        rank = self.ranks[number]
        address = self.address(rank.node)
        ended = {report.rank for report in reports if address in report.message + report.log}
        before = [n for n in ended if n != number and n in self._broken and self.ranks[n].ended < rank.ended]
        return len(before) < 2

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
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268,"
            " remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call"
            " failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB :"
            f" Got completion from peer {address}<{self.draw.randint(30000, 60000)}> with status=12 opcode=0 len=0"
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

    def _dies(self, number: int, at: float, signal: int, message: str = "",
              traceback: str = "", noted: float | None = None, log: str = "") -> None:  # fmt: skip
        """Let a signal end a process. The kernel frees its GPU and closes its connections, then its parent hears."""
        reaped = (
            at
            + self.draw.lognormvariate(-3, 1.2)
            + (self.draw.lognormvariate(-0.9, 0.8) if self.library == "nccl" else 0)
        )
        name = {9: "SIGKILL", 11: "SIGSEGV", 7: "SIGBUS", 4: "SIGILL", 6: "SIGABRT", 15: "SIGTERM"}[signal]
        closed = at + (reaped - at) * self.draw.random()
        self._note(number, noted or reaped, closed, "signal", signal, None, message or f"killed by {name}", traceback,
                   log)  # fmt: skip

    def _raises(self, number: int, at: float, text: str, own: bool = False) -> None:
        """Let a rank raise: it notes the error, runs its handlers, and closes its connections when it ends."""
        draw = self.draw
        ends = at + draw.lognormvariate(-1.5, 1.5)
        place = ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810)
        if own:
            place = ("/job/train.py", draw.randint(10, 400))
        traceback = traceback_of(place, text)
        chance = draw.random()
        if own and self.fault == "program":
            traceback = traceback_of(("/job/train.py", 88), text)
        if not own and chance < 0.05:  # the program caught it, and raised its own
            text = "RuntimeError: training step failed, giving up"
            traceback = traceback + "\n\nThe above exception was the direct cause of the following exception:\n\n"
            traceback += traceback_of(("/job/train.py", 301), text)
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
              exit_code: int | None = None, message: str = "", traceback: str = "", log: str = "") -> None:  # fmt: skip
        rank = self.ranks[number]
        if rank.ended < NEVER:
            return
        rank.ended, rank.closed = noted, closed
        groups = tuple(
            GroupSight(self._group_id(name, of), self.library, of.index(number), len(of), rank.entered[name])
            for name, of in rank.groups.items() if name != "pp"
        )  # fmt: skip
        node = self.node_name(rank.node)
        when = self.clock(rank.node, noted)
        self.reports.append(EndReport(number, node, kind, when, signal, exit_code, message, traceback, self._kept(log),
                                      groups))  # fmt: skip

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
            first = min(
                report_end for report_end in (self.ranks[n].ended for n in range(self.size)) if report_end < NEVER
            )
            for rank in self.ranks:
                heapq.heappush(queue, (first + draw.uniform(0.005, 0.3), rank.number, -2))
        for number_of_break, (when, number, _) in enumerate(self._breaks):
            heapq.heappush(queue, (when, number, -10 - number_of_break))
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
                self._broken.add(number)
            else:
                self._echo(number, at, peer)
            closes(number)

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
            text = WATCHDOG.format(rank=number, seq=seen) if self.library == "nccl" else draw.choice(TIMEOUTS)
        else:
            texts = NCCL if self.library == "nccl" else GLOO
            text = draw.choice(texts).format(
                address=self.address(self.ranks[peer].node), port=draw.randint(30000, 60000)
            )
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
            reports.append(EndReport(-1, self.node_name(node), "node_lost", heard + self.unix_ahead_s))
        draw.shuffle(reports)
        if self.fault == "network":
            self.none_is_right = self._one_link(reports)
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
