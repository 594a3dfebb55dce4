"""Reads JSON that may be torn, old, or of another program: typed answers, never an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def printable(text: str, limit: int = 200) -> str:
    """Return ``text`` on one line and at most ``limit`` characters long, safe for a terminal."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in cut)


_YEAR_10000 = 253_402_214_400.0  # less a day, for time zones


@dataclass(frozen=True)
class Fields:
    """A JSON object's fields; what is missing or of the wrong type reads as the default."""

    data: Mapping[str, Any]

    @classmethod
    def of(cls, value: object) -> Fields:
        """Return the fields of ``value``; no fields when it is no object."""
        return cls(value if isinstance(value, dict) else {})

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.data.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:  # an integer beyond every float
            return None

    def time(self, name: str) -> float | None:
        """Return a time in Unix seconds within a calendar of four-digit years."""
        value = self.number(name)
        return value if value is not None and 0.0 <= value < _YEAR_10000 else None

    def whole(self, name: str) -> int | None:
        """Return a whole number of at most 64 bits."""
        value = self.data.get(name)
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
        return value if fits else None

    def text(self, name: str, default: str = "") -> str:
        """Return a string, unchanged: see ``printable``."""
        value = self.data.get(name)
        return value if isinstance(value, str) else default

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a list."""
        value = self.data.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()

    def each(self, name: str) -> tuple[Fields, ...]:
        """Return the objects of a list."""
        value = self.data.get(name)
        return tuple(Fields(item) for item in value if isinstance(item, dict)) if isinstance(value, list) else ()

    def inner(self, name: str) -> Fields:
        """Return an object inside."""
        return Fields.of(self.data.get(name))

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self.data.get(name) is not None


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``text``; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, too deep, a number of thousands of digits
        return None
    return value if isinstance(value, dict) else None
