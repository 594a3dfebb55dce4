"""Tells when memory is nearly full, and when it will be (OPS-4). Pure: values and times come in, levels come out.

A level is reported once: it ends only well below where it began, and the same level is not reported again for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from resilio_hpc.metrics.messages import MemoryNews
from resilio_hpc.metrics.sheet import Sheet

WARNING, CRITICAL = 0.90, 0.95  # of the limit
BELOW = 0.05  # of the limit: so far below its beginning, a level ends
AGAIN_S = 600.0  # the same level is not told again before
SAMPLES = 30  # for the trend
LEAST_SAMPLES = 6
LEAST_GROWTH = 0.002  # of the limit over the samples; less is noise
FARTHEST_S = 7 * 86400.0
GPU_HEADROOM = 4 / 80  # of a GPU's memory
LEVELS = ("as usual", "warning", "critical")


class MemoryUsed(NamedTuple):
    """The use of one limited memory. ``reserve`` > 0: the warning begins where less is free; never critical."""

    subject: str
    used_bytes: float
    limit_bytes: float
    reserve_bytes: float = 0.0


@dataclass
class _Watched:
    history: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    told_at: dict[int, float] = field(default_factory=dict)
    last: MemoryNews | None = None


class MemoryWatch:
    """Watches all memories of one node."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def look(self, uses: Sequence[MemoryUsed], largest: tuple[str, float], now: float) -> list[MemoryNews]:
        """Return the levels that changed. ``largest``: the rank with the most memory, for the text."""
        for gone in self._watched.keys() - {use.subject for use in uses}:
            del self._watched[gone]
        news = []
        for use in uses:
            if use.limit_bytes <= 0:
                continue
            one = self._watched.setdefault(use.subject, _Watched())
            one.history.append((now, use.used_bytes))
            grows = slope(one.history, LEAST_GROWTH * use.limit_bytes)
            left = max(use.limit_bytes - use.used_bytes, 0.0)
            full_in_s = left / grows if grows > 0 and left / grows < FARTHEST_S else None
            before, one.level = one.level, level_of(use, one.level)
            one.last = MemoryNews(
                use.subject, one.level, before, use.used_bytes, use.limit_bytes, grows, full_in_s, *largest
            )
            rises = one.level > before and now - one.told_at.get(one.level, -AGAIN_S) >= AGAIN_S
            if rises:
                one.told_at[one.level] = now
            if rises or (before and not one.level):
                news.append(one.last)
        return news

    @property
    def worst(self) -> MemoryNews | None:
        """Return what is nearest to its end of those with a level, None where all is as usual."""
        standing = [one.last for one in self._watched.values() if one.last is not None and one.level]
        return max(standing, key=lambda news: (news.level, news.used_bytes / news.limit_bytes), default=None)

    def put(self, sheet: Sheet) -> None:
        """Write levels and forecasts down."""
        for subject, one in self._watched.items():
            if one.last is not None:
                sheet.put("memory_level", one.level, subject)
                sheet.put("memory_full_in_seconds", one.last.full_in_s, subject)


def level_of(use: MemoryUsed, before: int) -> int:
    """Return the level of a use. ``before``: the level until now, which ends later than it began."""
    share = use.used_bytes / use.limit_bytes
    begins = (WARNING, CRITICAL)
    if use.reserve_bytes > 0:
        begins = (1 - use.reserve_bytes / use.limit_bytes, float("inf"))
    below = min(BELOW, use.reserve_bytes / use.limit_bytes / 2) if use.reserve_bytes > 0 else BELOW
    reached = sum(share >= at for at in begins)
    kept = sum(share >= at - below for at in begins[:before])
    return max(reached, kept)


def slope(history: Sequence[tuple[float, float]], least: float) -> float:
    """Return by how much a value grows per second: the median over all pairs (Theil and Sen); 0 for noise.

    One sample that is far off, as while a checkpoint is written, does not change it.
    """
    if len(history) < LEAST_SAMPLES:
        return 0.0
    points = list(history)
    slopes = [
        (later - earlier) / (then - when)
        for number, (when, earlier) in enumerate(points)
        for then, later in points[number + 1 :]
        if then > when
    ]
    found = median(slopes) if slopes else 0.0
    return found if abs(found) * (points[-1][0] - points[0][0]) >= least else 0.0


def uses_of(sheet: Sheet, limits: Sequence[MemoryUsed], gpu_headroom_bytes: int | None) -> list[MemoryUsed]:
    """Return the memories of a sample. ``limits``: those of single ranks. What is not known is not watched."""
    found = []
    total, available = sheet.get("host_memory_total_bytes"), sheet.get("host_memory_available_bytes")
    if total and available is not None:
        found.append(MemoryUsed("host", total - available, total))
    limit, used = sheet.get("job_memory_limit_bytes"), sheet.get("job_memory_used_bytes")
    if limit and used is not None and (total is None or limit < total):
        found.append(MemoryUsed("job", used, limit))
    found += limits
    if gpu_headroom_bytes == 0:
        return found
    in_use = sheet.labelled("gpu_memory_used_bytes")
    for gpu, size in sheet.labelled("gpu_memory_total_bytes").items():
        reserve = GPU_HEADROOM * size if gpu_headroom_bytes is None else gpu_headroom_bytes
        if gpu in in_use and 0 < reserve < size:
            found.append(MemoryUsed(f"gpu {gpu}", in_use[gpu], size, reserve))
    return found
