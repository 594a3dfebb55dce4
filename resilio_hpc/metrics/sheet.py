"""One sample of a node: values by metric and labels, checked as they are written down."""

from __future__ import annotations

import math
from collections.abc import Iterator

from resilio_hpc.metrics.schema import GAUGE, METRICS

MOST_SERIES = 4096  # of one sheet; a node with 8 GPUs and ranks has about 600
LONGEST_LABEL = 64

Key = tuple[str, tuple[str, ...]]


class Sheet:
    """Values by (name, labels), in the order in which they came."""

    def __init__(self) -> None:
        self._values: dict[Key, float] = {}
        self.refused = 0
        """Values that were no numbers, or too many."""

    def put(self, name: str, value: object, *labels: object) -> None:
        """Write a value down; None leaves it out. A name or number of labels outside of the schema is a mistake here.

        What comes from outside, value and label, may be anything.
        """
        metric = METRICS[name]
        assert len(labels) == len(metric.labels), name
        if value is None:
            return
        key = (name, tuple(neutral(str(label)) for label in labels))
        full = len(self._values) >= MOST_SERIES and key not in self._values
        number = _number(value)
        if not math.isfinite(number) or full or (metric.kind != GAUGE and number < 0):
            self.refused += 1
        else:
            self._values[key] = number

    def get(self, name: str, *labels: str) -> float | None:
        """Return a value, None where there is none."""
        return self._values.get((name, labels))

    def items(self) -> Iterator[tuple[Key, float]]:
        """Yield what was written down."""
        yield from self._values.items()

    def labelled(self, name: str) -> dict[str, float]:
        """Return the values of a metric by its first label."""
        return {labels[0]: value for (other, labels), value in self._values.items() if other == name and labels}

    def update(self, other: Sheet) -> None:
        """Take over what another sheet has."""
        for key, value in other.items():
            if key in self._values or len(self._values) < MOST_SERIES:
                self._values[key] = value
        self.refused += other.refused


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def neutral(text: str) -> str:
    """Return what a label may hold of a name: printable ASCII without quotes and backslashes, 64 characters."""
    return "".join(x if x.isascii() and x.isprintable() and x not in '"\\{}' else "_" for x in text[:LONGEST_LABEL])


def series(key: Key) -> str:
    """Return a series' name in files: ``rank_step{rank=3}``."""
    name, labels = key
    inner = ",".join(f"{label}={value}" for label, value in zip(METRICS[name].labels, labels, strict=True))
    return f"{name}{{{inner}}}" if inner else name
