"""Whether a file system of checkpoints is about to be full, by its free space after each commit (OPS-7). Pure.

Told before a save fails, and seldom: again only when half of the time that was told is over.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 24 * 3600.0
LEAST_S = 600.0  # of samples: what comes and goes within minutes is no trend
LEAST_SAMPLES = 20
SOON_S = 24 * 3600.0
_MAX_SAMPLES = 500


class SpaceTrend:
    """Of one file system. ``now`` in seconds of any clock that does not jump, sizes in bytes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._told_until = float("-inf")
        self._is_short = False

    def committed(self, now: float, free_bytes: int, step_bytes: int) -> str:
        """After a commit of ``step_bytes``: what to tell, or "".

        Steps that are no longer kept make room for new ones, so what counts is how ``free_bytes`` changes.
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
        """From the least of the former half of the samples to the least of the latter: steps come and go in between.

        For ever where that does not fall."""
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
