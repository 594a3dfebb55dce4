"""How long a wait may last, learned from waits that ended."""

from __future__ import annotations

from typing import Annotated

import msgspec

LEAST_S = 2.0
TIMES_AS_LONG = 3.0
WARM_UP = 10  # steps, before a limit is given

Wait = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Waits(msgspec.Struct, frozen=True):
    """What is known of the waits so far: their number, the steps that ended them, and the two longest, in seconds."""

    number: Number = 0
    steps: Number = 0
    longest_s: Wait = 0.0
    second_s: Wait = 0.0


class LearnedLimit:
    """The limit is ``TIMES_AS_LONG`` the second longest wait so far, and at least ``least_s`` seconds.

    The longest is left out: it may have been a hang. A pause that comes again, such as an evaluation, is learned when
    it has come twice.
    """

    def __init__(self, least_s: float = LEAST_S, warm_up: int = WARM_UP) -> None:
        self.waits = Waits()
        self.least_s, self._warm_up = least_s, warm_up

    def learn(self, wait_s: float, steps: int = 1) -> None:
        """Take a wait that has ended with so many steps: fast steps are seen several at a time."""
        *_, second_s, longest_s = sorted((self.waits.longest_s, self.waits.second_s, wait_s))
        self.waits = Waits(self.waits.number + 1, self.waits.steps + steps, longest_s, second_s)

    @property
    def seconds(self) -> float | None:
        """Return the limit; None during the warm-up."""
        known = self.waits.number > 1 and self.waits.steps >= self._warm_up
        return max(self.least_s, TIMES_AS_LONG * self.waits.second_s) if known else None
