"""How long a wait may last, learned from waits that ended."""

from __future__ import annotations

LEAST_S = 2.0
TIMES_AS_LONG = 3.0
WARM_UP = 10  # steps, before a limit is given


class LearnedLimit:
    """The limit is ``TIMES_AS_LONG`` the second longest wait so far, and at least ``least_s`` seconds.

    The longest is left out: it may have been a hang. A pause that comes again, such as an evaluation, is learned when
    it has come twice.
    """

    def __init__(self, least_s: float = LEAST_S, warm_up: int = WARM_UP) -> None:
        self.longest_s = self._second_s = 0.0
        self._least_s, self._warm_up = least_s, warm_up
        self._waits = self._steps = 0

    def learn(self, wait_s: float, steps: int = 1) -> None:
        """Take a wait that has ended with so many steps: fast steps are seen several at a time."""
        self._waits += 1
        self._steps += steps
        if wait_s > self.longest_s:
            self.longest_s, self._second_s = wait_s, self.longest_s
        elif wait_s > self._second_s:
            self._second_s = wait_s

    @property
    def seconds(self) -> float | None:
        """Return the limit; None during the warm-up."""
        known = self._waits > 1 and self._steps >= self._warm_up
        return max(self._least_s, TIMES_AS_LONG * self._second_s) if known else None
