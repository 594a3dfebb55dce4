"""The iteration of a script that reports no steps, found in its calls: the shortest sequence that comes again.

Training calls its communication library in the same order in each iteration. Now and then there is more: an evaluation,
a save. So the sequence need not repeat without exception, and an iteration is counted by the call of it that is rarest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import eq
from typing import Protocol

from resilio_hpc.diagnose.hangs.call_ring import RawCall

HISTORY = 2048  # calls in which it is looked for
FEWEST = 32  # calls, before the first look
REPEATS = 3  # times that it must have come
ALIKE = 0.9  # of the calls are as one iteration before
EQUAL = 0.002  # a longer sequence must fit better by this: the calls of one iteration may repeat among themselves
SELDOM = 100_000  # calls to the next look, at most: one that finds nothing takes 40 ms
LENGTHS = 200  # that are tried at most
LOST = 4  # iterations' calls without its mark: it is looked for again

Mark = tuple[int, int, int, int]


class Records(Protocol):
    """What is read of a ring; `CallRing` is one."""

    def since(self, first: int) -> list[RawCall]:
        """Return the records from this number on."""


class Iterations:
    """Counts the iterations of one rank. ``done``: so many ended; -1 until an iteration is known."""

    def __init__(self, ring: Records) -> None:
        self._ring = ring
        self._next = 0
        self._marks: list[Mark] = []
        self._look_at = FEWEST
        self._seen = 0
        self._mark: Mark | None = None
        self._often = self._length = 1  # the mark is in each iteration so often; calls of an iteration
        self._met = self._unmet = 0  # marks counted, and calls since the last one
        self.done = -1

    def advance(self) -> None:
        """Take the calls since the last time."""
        calls = self._ring.since(self._next)
        if not calls:
            return
        if calls[0].stamp > self._next + 1:  # some were overwritten unseen
            self._marks = []
        self._next = calls[-1].stamp
        new = [(call.op, call.dtype, call.elements, call.group) for call in calls]
        self._marks = (self._marks + new)[-HISTORY:]
        self._seen += len(new)
        if self._mark is not None:
            self._count(new)
        if self._mark is None and self._seen >= self._look_at:
            self._look()

    def _count(self, new: Sequence[Mark]) -> None:
        for mark in new:
            if mark == self._mark:
                self._met, self._unmet = self._met + 1, 0
            else:
                self._unmet += 1
        self.done += self._met // self._often
        self._met %= self._often
        if self._unmet > max(LOST * self._length, FEWEST):
            self._mark = None
            self._look_at = self._seen + FEWEST

    def _look(self) -> None:
        """Look in all calls first: the newest ones may be a part that comes again within the iteration."""
        marks = self._marks
        length = iteration_of(marks)
        while not length and len(marks) >= 2 * FEWEST:
            marks = marks[len(marks) // 2 :]
            length = iteration_of(marks)
        if not length:
            self._look_at = min(2 * self._seen, self._seen + SELDOM)
            return
        self._mark, self._often = rarest(self._marks[-length * REPEATS :], length)
        self._length = length
        self._met = self._unmet = 0
        self.done = max(self.done, 0)


def iteration_of(marks: Sequence[Mark]) -> int:
    """Return how many calls an iteration has; 0 where none comes again. Pure."""
    if not marks:
        return 0
    last = marks[-1]
    longest = len(marks) // REPEATS
    lengths = [length for length in range(1, longest + 1) if marks[-1 - length] == last][:LENGTHS]
    found, best = 0, ALIKE
    for length in lengths:
        alike = sum(map(eq, marks[length:], marks)) / (len(marks) - length)
        if alike >= best + (EQUAL if found else 0.0):
            found, best = length, alike
        if best == 1.0:
            break
    return found


def rarest(marks: Sequence[Mark], length: int) -> tuple[Mark, int]:
    """Return the call that is rarest in an iteration, and how often it is there. Pure."""
    often = Counter(marks[-length:])
    everywhere = [mark for mark in often if mark in marks[:length]]  # not one of an evaluation
    mark = min(everywhere or often, key=lambda mark: (often[mark], mark))
    return mark, often[mark]
