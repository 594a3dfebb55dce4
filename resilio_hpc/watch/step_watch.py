"""Whether a run's steps go on. It only tells: what follows is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.watch.learned_limit import LearnedLimit

LOOK_S = 0.1
NODES_PER_S = 20_000  # a look at thousands of nodes takes a millisecond


@dataclass(frozen=True)
class Stalled:
    """No step for longer than the limit. ``nodes``: those that have done the fewest steps."""

    step: int
    silent_s: float
    limit_s: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class GoesOn:
    """A step again after `Stalled`. ``waited_s``: since the step before."""

    step: int
    waited_s: float


class StepWatch:
    """Looks at the steps of all nodes that train. A run with another number of ranks is learned from the start.

    Times: seconds of a clock that does not jump.
    """

    def __init__(self) -> None:
        self.next_look = 0.0
        self._limit = LearnedLimit()
        self._ranks = 0
        self._round = self._step = -1
        self._since: float | None = None  # when that step was seen; None while steps are not expected
        self._told = False

    def stalled_s(self, now: float) -> float | None:
        """Return for how long there has been no step, once that is too long; else None."""
        return now - self._since if self._told and self._since is not None else None

    def look(
        self, round_number: int, ranks: int, steps: Mapping[str, int] | None, now: float
    ) -> Stalled | GoesOn | None:
        """Take the steps done on each node, and return what is new.

        ``steps``: None while none are expected, because ranks start, have finished or were asked to stop; -1 where they
        are not reported.
        """
        self.next_look = now + max(LOOK_S, len(steps or ()) / NODES_PER_S)
        step = min(steps.values(), default=-1) if steps else -1
        if steps is None or step < 0:
            self._since, self._told = None, False
            return None
        if ranks != self._ranks:
            self._limit, self._ranks = LearnedLimit(), ranks
        if round_number != self._round or self._since is None:
            self._round, self._step, self._since, self._told = round_number, step, now, False
            return None
        waited_s = now - self._since
        if step > self._step:
            told = self._told
            self._limit.learn(waited_s, step - self._step)
            self._step, self._since, self._told = step, now, False
            return GoesOn(step, round(waited_s, 3)) if told else None
        limit_s = self._limit.seconds
        if self._told or limit_s is None or waited_s <= limit_s:
            return None
        self._told = True
        behind = tuple(sorted(node for node, done in steps.items() if done == step))
        return Stalled(step, round(waited_s, 3), round(limit_s, 3), behind)
