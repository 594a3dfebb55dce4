"""All limits of a run: how long it may go without a step or a call, and how long a section may last.

Each is learned from the run's own waits, unless the user has set it. What was learned can be kept, and taken up by the
next controller of the same program with the same number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from resilio_hpc.watch.learned_limit import LEAST_S, WARM_UP, LearnedLimit, Waits

FIRST_LIMIT_S = 60.0  # while none is learned: a second step may compile for long
FIRST_SECTION_S = 600.0  # the same for a section, such as an evaluation
SECTION_LEAST_S = 10.0
SECTION_WARM_UP = 2
MOST_SECTIONS = 100
SILENT_LEAST_S = 10.0  # of a script that reports no steps
SILENT_WARM_UP = 100  # calls
STEP, CALL, FIRST_STEP = "step", "call", "first_step"
SECTION = "section:"  # before the name of a section
LONGEST_NAME = 100
LEARNED, FIRST, SET, OPTION, DEFAULT = "learned", "not learned yet", "set", "option", "default"
"""Where a limit comes from."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,100}\Z")]
Limit = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class LimitEntry(msgspec.Struct, frozen=True):
    """One limit. ``name``: with ``SECTION`` before it for a section; ``limit_s``: None, where there is none.

    ``floor_s``: what is learned is never below it; ``waits``: from which it is learned.
    """

    name: Name
    limit_s: Limit | None
    source: Name
    floor_s: Limit | None = None
    waits: Waits = Waits()


class LimitTable:
    """The limits for one number of ranks. ``chosen``: seconds that the user has set, by name.

    ``at_most_s``: ranks are restarted after so long without a step, so a limit for steps or calls is no longer.
    """

    def __init__(self) -> None:
        self.chosen: Mapping[str, float] = {}
        self.at_most_s = math.inf
        self._learned = _nothing_learned()
        self._kept: tuple[int, Mapping[str, Waits]] = (0, {})

    def forget(self, name: str = "") -> None:
        """Learn this limit, or all, from the start."""
        if not name:
            self._learned = _nothing_learned()
        elif name in self._learned:
            self._learned[name] = _new(name)

    def take_up(self, ranks: int, kept: Mapping[str, Waits]) -> None:
        """Take what an earlier controller has learned, for when a round of so many ranks begins."""
        names = [name for name in kept if name in (STEP, CALL) or name.startswith(SECTION)]
        self._kept = (ranks, {name: kept[name] for name in names[:MOST_SECTIONS]})

    def begin(self, ranks: int) -> None:
        """Begin with another number of ranks, with what is kept for it."""
        self.forget()
        if self._kept[0] == ranks:
            for name, waits in self._kept[1].items():
                self._learned[name] = _new(name)
                self._learned[name].waits = waits
        self._kept = (0, {})

    def learn(self, name: str, wait_s: float, steps: int = 1) -> None:
        """Take a wait that has ended."""
        if name not in self._learned and len(self._learned) >= MOST_SECTIONS:
            self._learned = {known: self._learned[known] for known in (STEP, CALL)}
        self._learned.setdefault(name, _new(name)).learn(wait_s, steps)

    def longest_s(self, name: str) -> float:
        """Return the longest wait that ended; 0 without any."""
        return self._learned[name].waits.longest_s if name in self._learned else 0.0

    def seconds(self, name: str) -> float:
        """Return the limit."""
        return self._limit(name)[0]

    def _limit(self, name: str) -> tuple[float, str]:
        """Return the limit, and where it comes from."""
        if name in self.chosen:
            return self.chosen[name], SET
        limit_s, source = self._from_waits(name)
        if name in (STEP, CALL) and limit_s > self.at_most_s:
            return self.at_most_s, OPTION
        return limit_s, source

    def _from_waits(self, name: str) -> tuple[float, str]:
        learned = self._learned[name].seconds if name in self._learned else None
        if learned is not None:
            return learned, LEARNED
        if name.startswith(SECTION):
            return FIRST_SECTION_S, FIRST
        return (self.chosen[FIRST_STEP], SET) if FIRST_STEP in self.chosen else (FIRST_LIMIT_S, FIRST)

    def entries(self) -> list[LimitEntry]:
        """Return all limits that are known, sections by name."""
        first_s = self.chosen.get(FIRST_STEP)
        found = [
            LimitEntry(FIRST_STEP, FIRST_LIMIT_S, DEFAULT) if first_s is None else LimitEntry(FIRST_STEP, first_s, SET)
        ]
        sections = sorted({name for name in (*self._learned, *self.chosen) if name.startswith(SECTION)})
        for name in (STEP, CALL, *sections):
            limit_s, source = self._limit(name)
            learned = self._learned.get(name) or _new(name)
            found.append(LimitEntry(name, limit_s, source, learned.least_s, learned.waits))
        return found


def _nothing_learned() -> dict[str, LearnedLimit]:
    return {name: _new(name) for name in (STEP, CALL)}


def _new(name: str) -> LearnedLimit:
    if name == STEP:
        return LearnedLimit(LEAST_S, WARM_UP)
    if name == CALL:
        return LearnedLimit(SILENT_LEAST_S, SILENT_WARM_UP)
    return LearnedLimit(SECTION_LEAST_S, SECTION_WARM_UP)
