"""Whether a file system of checkpoints is about to be full, by its free space after each commit (OPS-7). Pure.

The warning comes before a save fails, and seldom: again only when half of the predicted time is over.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 24 * 3600.0
LEAST_S = 600.0  # span of the samples: changes within minutes are no trend
LEAST_SAMPLES = 20
SOON_S = 24 * 3600.0
_MAX_SAMPLES = 500


class SpaceTrend:
    """The trend of one file system. ``now`` in seconds of a clock that does not jump, sizes in bytes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._told_until = float("-inf")
        self._is_short = False

    def committed(self, now: float, free_bytes: int, step_bytes: int) -> str:
        """Take a commit of ``step_bytes``; return a warning, or "".

        Removed steps make space for new ones, so the change of ``free_bytes`` counts.
        """
        samples = self._samples
        samples.append((now, free_bytes))
        while len(samples) > _MAX_SAMPLES or now - samples[0][0] > WINDOW_S:
            samples.popleft()
        if free_bytes < step_bytes:
            was_short, self._is_short = self._is_short, True
            return "" if was_short else f"{_gb(free_bytes)} are free, less than the {_gb(step_bytes)} of a step"
        self._is_short = False
        full_in_s = self._full_in_s(free_bytes - step_bytes)
        if full_in_s > SOON_S or now < self._told_until:
            return ""
        self._told_until = now + full_in_s / 2
        return f"{_gb(free_bytes)} are free; as it goes, there is no room for a step in {_hours(full_in_s)}"

    def _full_in_s(self, left_bytes: int) -> float:
        """Return the seconds until it is full, by the minima of the first and second half of the samples.

        Infinite where those do not fall. Minima, since steps come and go in between.
        """
        samples = list(self._samples)
        if len(samples) < LEAST_SAMPLES or samples[-1][0] - samples[0][0] < LEAST_S:
            return float("inf")
        half = len(samples) // 2
        (at, before), (later, now) = (min(some, key=lambda one: one[1]) for some in (samples[:half], samples[half:]))
        return left_bytes * (later - at) / (before - now) if now < before else float("inf")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.0f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
