"""What every benchmark shares: series of timings, where a time-out counts as never, their table and their JSON."""

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

NEVER = math.inf


@dataclass
class Series:
    """Timings of one method under one setting, in seconds; NEVER where it did not finish within the limit."""

    name: str
    settings: str
    values_s: list[float] = field(default_factory=list)
    phases_s: list[Mapping[str, float]] = field(default_factory=list)
    """Per finished timing, what it is made of."""

    def finished_s(self) -> list[float]:
        return [value for value in self.values_s if value != NEVER]

    def median_s(self) -> float:
        """Of all timings, those that never finished included: with half of them it is NEVER."""
        return statistics.median_high(self.values_s) if self.values_s else NEVER

    def percentile_s(self, percent: float) -> float:
        """Return the smallest timing that this share of all timings does not exceed (nearest rank)."""
        ordered = sorted(self.values_s)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else NEVER

    def median_phases_s(self) -> dict[str, float]:
        names = self.phases_s[0] if self.phases_s else {}
        return {name: statistics.median(phases[name] for phases in self.phases_s) for name in names}

    def summary(self) -> dict[str, object]:
        """For JSON, where a timing that never came is null."""
        return {
            "name": self.name,
            "settings": self.settings,
            "values_s": [known(value) for value in self.values_s],
            "median_s": known(self.median_s()),
            "p95_s": known(self.percentile_s(95)),
            "max_s": known(max(self.values_s, default=NEVER)),
            "never": len(self.values_s) - len(self.finished_s()),
            "median_phases_s": self.median_phases_s(),
        }


def known(value_s: float) -> float | None:
    return None if value_s == NEVER else round(value_s, 4)


def shown(value_s: float) -> str:
    """Three figures, as a person reads them."""
    if value_s == NEVER:
        return "never"
    return f"{value_s:.3f}" if value_s < 1 else f"{value_s:.3g}"


def machine() -> dict[str, object]:
    """Return what the numbers were measured on."""
    return {
        "processors": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_average": os.getloadavg()[0],
    }


def print_table(title: str, series: Sequence[Series], console: Console | None = None) -> None:
    """One row a series: median, worst, how many finished, and the median of each phase."""
    phases = list(dict.fromkeys(name for one in series for name in one.median_phases_s()))
    table = Table(title=title, title_justify="left")
    for column in ("", "settings"):
        table.add_column(column)
    for column in ("median s", "max s", "finished", *phases):
        table.add_column(column, justify="right")
    for one in series:
        split = one.median_phases_s()
        cells = [shown(split[name]) if name in split else "–" for name in phases]
        finished = f"{len(one.finished_s())}/{len(one.values_s)}"
        worst = shown(max(one.values_s, default=NEVER))
        table.add_row(one.name, one.settings, shown(one.median_s()), worst, finished, *cells)
    (console or Console()).print(table)


def write_json(path: Path, title: str, series: Sequence[Series]) -> None:
    results = {"title": title, "machine": machine(), "series": [one.summary() for one in series]}
    path.write_text(json.dumps(results, indent=2) + "\n")
