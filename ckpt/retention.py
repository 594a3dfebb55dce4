"""Which committed steps to keep (OPS-7): the last N, every K-th, and nothing older than an age; never none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """``keep_last``: steps committed last. ``keep_every`` K: also steps that K divides (0: none).

    ``max_age_s``: of all those, only the ones committed within so many seconds (None: of any age).
    """

    keep_last: int
    keep_every: int = 0
    max_age_s: float | None = None

    def expendable(self, steps: Sequence[tuple[int, float]], now: float) -> list[int]:
        """Steps that may go. ``steps``: (step, Unix time of its commit) in the order of the commits.

        The step committed last always stays.
        """
        gone = []
        for number, (step, committed) in enumerate(steps[:-1]):
            is_last = len(steps) - number <= self.keep_last
            is_milestone = self.keep_every > 0 and step % self.keep_every == 0
            is_old = self.max_age_s is not None and now - committed > self.max_age_s
            if is_old or not (is_last or is_milestone):
                gone.append(step)
        return gone
