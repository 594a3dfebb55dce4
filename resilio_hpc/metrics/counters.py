"""The counters of errors before and after a round, and which of them grew: they are gone when one looks later. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from resilio_hpc.metrics.schema import ERRORS
from resilio_hpc.metrics.sheet import Sheet, series

MOST = 64  # counters of one event


def error_counters(sheet: Sheet) -> dict[str, float]:
    """Return the counters of errors that are not 0, by series."""
    return {series(key): value for key, value in sheet.items() if key[0] in ERRORS and value > 0}


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much counters grew; one that fell was set back, and has grown by what it is now."""
    found = {}
    for name, value in after.items():
        old = before.get(name, 0.0)
        if value != old:
            found[name] = value - old if value > old else value
    return found


def bounded(counters: Mapping[str, float]) -> dict[str, int]:
    """Return at most MOST of them, those that grew most first."""
    chosen = sorted(counters.items(), key=lambda one: (-one[1], one[0]))[:MOST]
    return {name: round(value) for name, value in chosen}
