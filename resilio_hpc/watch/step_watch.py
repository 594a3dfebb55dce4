"""Whether a run goes on. It only tells: what follows is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from resilio_hpc.watch.limit_table import CALL, FIRST_STEP, SECTION, STEP, LimitTable

LOOK_S = 0.1
NODES_PER_S = 20_000  # a look at thousands of nodes takes a millisecond


class Stalled(Struct, frozen=True):
    """No step for longer than the limit. ``step``: -1 where none are reported, so that calls were counted.

    ``nodes``: those that have done the fewest steps. ``starts``: there was none yet, which may be in order.
    """

    step: int
    silent_s: float
    limit_s: float
    nodes: tuple[str, ...]
    starts: bool = False


class GoesOn(Struct, frozen=True):
    """A step again after `Stalled`. ``waited_s``: since the step before."""

    step: int
    waited_s: float


class StepWatch:
    """Looks at the steps of all nodes that train. A run with another number of ranks is learned from the start.

    Where ranks report no steps, their calls of communication libraries are counted instead. Before the first of both,
    nothing is learned. Times: seconds of a clock that does not jump.
    """

    def __init__(self) -> None:
        self.next_look = 0.0
        self._ranks = 0
        self._counted = STEP  # what is counted; FIRST_STEP before there is a step or a call
        self.limits = LimitTable()
        self._round = self._count = self._calls = -1
        self._since: float | None = None  # when that count was seen; None while nothing is expected
        self._moved = 0.0  # when a call was last seen
        self._told = False
        self._section, self._entered = "", 0.0  # what ranks do beside steps, and since when

    def expect(self, ranks: int) -> None:
        """Begin with so many ranks, if they were others."""
        if ranks != self._ranks:
            self._ranks, self._since = ranks, None
            self.limits.begin(ranks)

    def stalled_s(self, now: float) -> float | None:
        """Return for how long there has been no step, once that is too long; else None."""
        return now - self._since if self._told and self._since is not None else None

    @property
    def limit_s(self) -> float:
        """Return for how long there may be no step."""
        return self.limits.seconds(SECTION + self._section if self._section else self._counted)

    def wait_again(self, now: float) -> None:
        """Wait from now on: for a time, no look was possible."""
        if self._since is not None and not self._told:
            self._since = now

    def silent_s(self, now: float) -> float:
        """Return for how long there has been no step and no call; 0 while nothing is expected."""
        return now - max(self._since, self._moved) if self._since is not None else 0.0

    @property
    def longest_s(self) -> float:
        """Return the longest wait between two steps of this run that ended well; 0 without any."""
        return self.limits.longest_s(CALL if self._counted == CALL else STEP)

    def look(
        self, round_number: int, ranks: int, steps: Mapping[str, int] | None, now: float, calls: int = -1,
        section: str = "", starts: bool = False, certain: bool = False,
    ) -> Stalled | GoesOn | None:  # fmt: skip
        """Take the steps done on each node, and return what is new.

        ``steps``: None while none are expected, because ranks start, have finished or were asked to stop; -1 where they
        are not reported. ``calls``: of all ranks together; -1 where they are not known. A run whose calls go on does
        not stall, be it an evaluation. ``section``: what ranks do beside steps, which has a limit of its own.
        ``starts``: steps or calls are still to begin. ``certain``: the run is known to stand still, so that the limit
        need not be over.
        """
        self.next_look = now + max(LOOK_S, len(steps or ()) / NODES_PER_S)
        step = min(steps.values(), default=-1) if steps else -1
        count = step if step >= 0 else calls
        counted = STEP if step >= 0 else FIRST_STEP if starts else CALL
        if steps is None or (count < 0 and not starts):
            self._since, self._told = None, False
            return None
        self.expect(ranks)
        if counted != self._counted:
            told = self._told and self._since is not None and round_number == self._round
            waited_s = now - (self._since or now)
            self._counted, self._round, self._count, self._since, self._told = counted, round_number, count, now, False
            return GoesOn(step, round(waited_s, 3)) if told else None
        if calls != self._calls:
            self._calls, self._moved = calls, now
        if round_number != self._round or self._since is None:
            self._round, self._count, self._since, self._told = round_number, count, now, False
            return None
        waited_s = now - self._since
        if section != self._section:  # the run goes on; what was waited is no wait for a step
            told = self._told
            self._change_section(section, now)
            self._since, self._told = now, False
            return GoesOn(step, round(waited_s, 3)) if told else None
        if count > self._count:
            told = self._told
            if not section and counted != FIRST_STEP:
                self.limits.learn(counted, waited_s, count - self._count)
            self._count, self._since, self._told = count, now, False
            return GoesOn(step, round(waited_s, 3)) if told else None
        limit_s = self.limit_s
        if self._told or (self.silent_s(now) <= limit_s and not certain):
            return None
        self._told = True
        behind = tuple(sorted(node for node, done in steps.items() if done == step)) if step >= 0 else ()
        return Stalled(step, round(waited_s, 3), round(limit_s, 3), behind, counted == FIRST_STEP)

    def _change_section(self, section: str, now: float) -> None:
        """Learn how long the section lasted that is over, and begin another one."""
        if self._section:
            self.limits.learn(SECTION + self._section, now - self._entered)
        self._section, self._entered = section, now
