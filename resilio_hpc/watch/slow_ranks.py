"""Which ranks do their own work slower than before, and slower than their peers. Pure; its time grows with the ranks.

A rank's **share** is its own work as part of the time: between leaving one collective call and entering the next. All
ranks of a run share that time, so shares compare ranks with each other, whatever a step costs. Each rank is compared
with its own usual place among all of them: stages of a pipeline, or a first rank that writes logs, differ for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set

from msgspec import Struct

from resilio_hpc.watch.change_points import LEARN, RECENT, Level, Peers

ALL_SLOWER = 1.3  # times as slow as before, for a run in which no rank stands out: work differs from step to step
LEAST_STEPS = 3  # of a window: partial steps at its ends count little
LEAST_CALLS = 30  # where no steps are reported
SINCE_START = 1.5  # times as slow as its peers: less may be how the work is divided
FIRST_RANK = 2.0  # the same for rank 0, which does what only one does
LEAST_PEERS = 4
LEAST_COST = 0.05  # of the time: what costs the run less is not told
LEAST_WAIT = 0.1  # of the time in calls, before a slow link matters
LEAST_SEEN = 0.5  # of a window: ranks of which less is known are left out
BLOCK = 6  # windows: where single ones are too noisy, sums of so many are compared as well
MOST_SHARE = 0.5  # of the ranks: of more, the others are the exception
TURNS = 3  # ranks whose slowness was over by itself: they take turns, as experts with the most tokens do
TURN = 24  # windows that it must last from then on


class WorkDone(Struct, frozen=True):
    """What one rank did in a window. ``rate``: bytes per second of its fastest large call; 0 without one."""

    own_s: float
    wait_s: float
    calls: int
    steps: int  # or iterations, found in the calls
    rate: float = 0.0

    def __add__(self, other: WorkDone) -> WorkDone:
        """Return both together."""
        return WorkDone(
            self.own_s + other.own_s, self.wait_s + other.wait_s, self.calls + other.calls, self.steps + other.steps,
            max(self.rate, other.rate),
        )  # fmt: skip

    @property
    def lasts_s(self) -> float:
        """Return how much time this accounts for."""
        return self.own_s + self.wait_s


class Slowdown(Struct, frozen=True):
    """A change for the worse, or its end. ``rank``: -1 for all of them.

    ``what``: "own" work, "link" or "step". ``ratio``: times as long as usual. ``windows``: for how many it was seen.
    ``since_start``: the rank was never as fast as its peers. ``cost``: the share of the time that it costs the run.
    """

    rank: int
    what: str
    ratio: float
    windows: int
    cost: float = 0.0
    since_start: bool = False
    over: bool = False


class SlowWatch:
    """Takes the work of all ranks, window by window. A new one is made for a new round: it learns again."""

    def __init__(self, role_of: Callable[[int], int] = lambda rank: 0) -> None:
        """Take each rank's role: ranks of one role do equal work."""
        self._role_of = role_of
        self._sum: dict[int, WorkDone] = {}
        self._block: list[Mapping[int, WorkDone]] = []
        self._own, self._own_blocks = Peers(), Peers()
        self._rate = Peers()
        self._step, self._own_s, self._wait_s = Level(), Level(), Level()
        self._told: set[tuple[str, int]] = set()
        self._over: set[int] = set()  # ranks whose own work was slow for a while
        self._checked = False
        self._in_steps = False  # calls are counted until a step is known

    @property
    def learned(self) -> bool:
        """Return whether enough was seen to compare with."""
        return self._own.windows >= LEARN

    @property
    def suspects(self) -> list[int]:
        """Return the ranks that were slow in half of the recent windows, or more."""
        return self._own.suspects

    def look(self, window: Mapping[int, WorkDone]) -> list[Slowdown]:
        """Take a window of all ranks, and return what is new."""
        for rank, work in window.items():
            before = self._sum.get(rank)
            self._sum[rank] = work if before is None else before + work
            if work.steps and not self._in_steps:  # what was learned of calls says nothing of steps
                self._in_steps = True
                self._step, self._own_s, self._wait_s = Level(), Level(), Level()
        if not self._is_whole():
            return []
        whole, self._sum = self._sum, {}
        longest_s = max(work.lasts_s for work in whole.values())
        return self._compare({rank: work for rank, work in whole.items() if work.lasts_s > LEAST_SEEN * longest_s})

    def _is_whole(self) -> bool:
        works = self._sum.values()
        if not works:
            return False
        steps = max(work.steps for work in works)
        if self._in_steps:
            return steps >= LEAST_STEPS
        return sorted(work.calls for work in works)[len(works) // 2] >= LEAST_CALLS

    def _compare(self, works: Mapping[int, WorkDone]) -> list[Slowdown]:
        shares = _shares(works)
        _take(self._own, shares)
        waits = {rank: work.wait_s / work.lasts_s for rank, work in works.items()}
        rates = {rank: 1.0 / work.rate for rank, work in works.items() if work.rate > 0}
        self._rate.take(rates, lambda rank, ratio: waits[rank] >= LEAST_WAIT)
        self._block.append(works)
        if len(self._block) == BLOCK:
            _take(self._own_blocks, _shares(_total(self._block)))
            self._block = []
        if self.learned and not self._checked:
            self._checked = True
            self._since_start(shares)
        own = self._own_blocks.slow | self._own.slow
        own_over = self._own.well - self._own_blocks.slow.keys()
        found = self._changes("own", own, own_over, shares)
        return found + self._changes("link", self._rate.slow, self._rate.well, waits) + self._all(works)

    def _changes(
        self, what: str, slow: Mapping[int, float], well: Set[int], shares: Mapping[int, float]
    ) -> list[Slowdown]:
        known = {rank for kind, rank in self._told if kind == what}
        if len(slow) > MOST_SHARE * len(shares):
            slow = {}  # of most ranks none is to blame: the step tells of it
        found = []
        peers = self._own if what == "own" else self._rate
        passes = what == "own" and len(self._over) >= TURNS
        for rank in sorted(slow.keys() - known):
            if passes and peers.seen(rank) < TURN and rank not in self._own_blocks.slow:
                continue
            cost = shares.get(rank, 0.0) * (1 - 1 / slow[rank])
            found.append(Slowdown(rank, what, slow[rank], peers.seen(rank), cost, peers.starts(rank)))
            self._told.add((what, rank))
        for rank in sorted(known & well):
            found.append(Slowdown(rank, what, 1.0, 0, over=True))
            self._told.discard((what, rank))
            self._over |= {rank} if what == "own" else set()
        return found

    def _all(self, works: Mapping[int, WorkDone]) -> list[Slowdown]:
        """Tell of a run that is slower as a whole, where no rank explains it."""
        calls = sorted(work.calls for work in works.values())[len(works) // 2]
        units = max(work.steps for work in works.values()) if self._in_steps else calls
        lasts_s = sorted(work.lasts_s for work in works.values())[len(works) // 2]
        explained = bool(self._told - {("step", -1)}) or self._own.suspected or self._rate.suspected
        own = sorted(work.own_s for work in works.values())[len(works) // 2]
        wait = min(work.wait_s for work in works.values())
        for level, value in ((self._step, lasts_s), (self._own_s, own), (self._wait_s, wait)):
            level.take(max(value, 1e-6) / units, hold=explained and level is not self._step)
        told = ("step", -1) in self._told
        if self._step.seen >= RECENT and self._step.ratio >= ALL_SLOWER and not told and not explained:
            self._told.add(("step", -1))
            gained = {"own": self._own_s.gain, "link": self._wait_s.gain}
            what = max(gained, key=lambda name: gained[name])
            ratio = self._step.ratio
            return [Slowdown(-1, what if gained[what] > 0 else "step", ratio, self._step.seen, 1 - 1 / ratio)]
        if told and self._step.is_well:
            self._told.discard(("step", -1))
            return [Slowdown(-1, "step", 1.0, self._step.seen, over=True)]
        return []

    def _since_start(self, shares: Mapping[int, float]) -> None:
        """Find ranks that were never as fast as most ranks of their role."""
        roles: dict[int, list[int]] = {}
        for rank in shares:
            roles.setdefault(self._role_of(rank), []).append(rank)
        for ranks in roles.values():
            if len(ranks) >= LEAST_PEERS:
                self._own.outliers(ranks, lambda rank: math.log(SINCE_START if rank else FIRST_RANK))


def _take(peers: Peers, shares: Mapping[int, float]) -> None:
    peers.take(shares, lambda rank, ratio: shares[rank] * (1 - 1 / ratio) >= LEAST_COST)


def _shares(works: Mapping[int, WorkDone]) -> dict[int, float]:
    return {rank: min(1.0, max(1e-4, work.own_s / work.lasts_s)) for rank, work in works.items()}


def _total(windows: Sequence[Mapping[int, WorkDone]]) -> dict[int, WorkDone]:
    """Return the sum of what is known of each rank in all windows."""
    found = dict(windows[0])
    for window in windows[1:]:
        found = {rank: found[rank] + work for rank, work in window.items() if rank in found}
    return found
