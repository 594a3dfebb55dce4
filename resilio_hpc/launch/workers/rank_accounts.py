"""How the node's ranks spend their time, window by window: from their call rings and from the kernel. RES-1, RES-2.

Windows begin at multiples of ``WINDOW_S`` of Unix time, so those of all nodes are the same up to their clocks. What a
rank does in a section (a save, an evaluation) is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from resilio_hpc.diagnose.hangs.call_ring import CallRing
from resilio_hpc.diagnose.slow import device_queues, kernel_facts
from resilio_hpc.diagnose.slow.call_times import CallTimes
from resilio_hpc.diagnose.slow.iterations import Iterations
from resilio_hpc.diagnose.slow.rank_facts import WINDOW_S, NodeFacts, RankWindow
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers import interception
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound

LOOK_S = 1.0  # between two looks at a ring, which must not be overwritten in between
LEAST_BACKLOG = 4096  # bytes for a network device: less may be a packet that is just being handed over
_MS = 1_000_000


class _Rank(Struct):
    """What is kept of one rank."""

    pid: int
    ring: CallRing | None = None
    times: CallTimes | None = None
    iterations: Iterations | None = None
    section: str = ""
    step: int = -1
    collected: float = 0.0
    looks: int = 0
    blocked: int = 0
    kernel: dict[str, int] = field(default_factory=dict)


class RankAccounts:
    """The account of the present round. ``tick`` is called often, and does little."""

    def __init__(self, arena_dir: Path, pids: Mapping[int, int]) -> None:
        """Take where the rings are, and a live view of the ranks' processes, by local rank."""
        self._arena_dir = arena_dir
        self._pids = pids
        self._ranks: dict[int, _Rank] = {}
        self._round = -1
        self._window = -1
        self._next_look = 0.0
        self._node: dict[str, int] = {}
        self._node_looks, self._backed_up = 0, 0

    def tick(self, local: LocalRound) -> tuple[int, tuple[RankWindow, ...], NodeFacts] | None:
        """Follow the rings. Return the window that has just ended, its ranks in their order, and the node."""
        if local.number != self._round:
            self.close()
            self._round, self._window = local.number, -1
        window = int(time.time() // WINDOW_S)
        ends = window != self._window
        now = time.monotonic()
        for number, rank in local.ranks.items():
            known = self._known(number)
            if known is not None and (ends or now >= self._next_look or known.section != rank.section):
                self._follow(known, rank)
        if ends or now >= self._next_look:
            self._next_look = now + LOOK_S
            self._node_looks += 1
            self._backed_up += device_queues.backlog() >= LEAST_BACKLOG
        if not ends:
            return None
        before, self._window = self._window, window
        ranks = tuple(self._cut(number, rank) for number, rank in local.ranks.items())
        facts = self._node_facts()
        is_whole = before == window - 1 and all(not rank.done for rank in local.ranks.values())
        return (before, ranks, facts) if is_whole else None

    def _known(self, number: int) -> _Rank | None:
        pid = self._pids.get(number)
        if pid is None:
            return None
        known = self._ranks.get(number)
        if known is None or known.pid != pid:
            if known is not None and known.ring is not None:
                known.ring.close()
            known = self._ranks[number] = _Rank(pid)
        if known.ring is None:
            with contextlib.suppress(OSError):
                known.ring = CallRing(interception.ring_file(self._arena_dir, self._round, number))
        if known.times is None and known.ring is not None and known.ring.process == pid:
            known.times, known.iterations = CallTimes(known.ring), Iterations(known.ring)
        return known

    @staticmethod
    def _follow(known: _Rank, rank: LocalRank) -> None:
        """Account for the time until now; what was spent in a section does not count.

        Iterations are looked for where no steps are reported.
        """
        if known.iterations is not None and rank.step < 0:
            known.iterations.advance()
        if known.times is not None:
            held = known.times.total
            known.times.advance()
            if known.section:
                known.times.total = held
        known.section = rank.section
        known.looks += 1
        known.blocked += is_blocked(known.pid)

    def _cut(self, number: int, rank: LocalRank) -> RankWindow:
        known = self._ranks.get(number)
        if known is None:
            return RankWindow()
        new = {"queued": kernel_facts.queued_ns(known.pid), "throttled": kernel_facts.throttled_ns(known.pid)}
        queued, throttled = (max(0, value - known.kernel.get(name, value)) // _MS for name, value in new.items())
        known.kernel = new
        step = rank.step if rank.step >= 0 or known.iterations is None else known.iterations.done
        steps = max(0, step - known.step) if known.step >= 0 else 0
        collecting = max(0, round((rank.collected_s - known.collected) * 1000))
        known.step, known.collected = step, rank.collected_s
        blocked = 100 * known.blocked // max(1, known.looks)
        known.looks = known.blocked = 0
        if known.times is None or not known.times.measured:
            return RankWindow(-1, 0, 0, steps, 0, queued, throttled, blocked, collecting)
        times = known.times.cut()
        own, wait = times.own_ns // _MS, times.wait_ns // _MS
        rate = round(times.rate / 1000)
        return RankWindow(own, wait, times.calls, steps, rate, queued, throttled, blocked, collecting)

    def _node_facts(self) -> NodeFacts:
        sent, resent = kernel_facts.segments()
        new = {
            "storage": kernel_facts.storage_us(), "resent": resent, "sent": sent,
            "errors": kernel_facts.network_errors(),
        }  # fmt: skip
        old, self._node = self._node, new
        grown = {name: max(0, value - old.get(name, value)) for name, value in new.items()}
        backed_up = 100 * self._backed_up // max(1, self._node_looks)
        self._node_looks = self._backed_up = 0
        return NodeFacts(
            grown["storage"] // 1000, grown["resent"], grown["sent"], 0, grown["errors"], backed_up=backed_up,
        )  # fmt: skip

    def close(self) -> None:
        """Close the rings."""
        for known in self._ranks.values():
            if known.ring is not None:
                known.ring.close()
        self._ranks.clear()


def is_blocked(pid: int) -> bool:
    """Return whether a process waits in the kernel for a device, or a file system."""
    fields = process_tree.stat(pid)
    return bool(fields) and fields[0] == b"D"
