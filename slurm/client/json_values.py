"""Single values of Slurm's JSON, as its data parsers from 22.05 to 26.05 write them. Pure; never raises.

A number may be a number, ``{"set": false, "infinite": true, "number": 0}``, a string of digits, or null; a list may be
a list of strings or one string with commas; any of them may be missing.
"""

from __future__ import annotations

import math
from typing import Any

# Slurm's own "nothing is set" and "no limit" in 32 and 64 bits (slurm.h: NO_VAL, INFINITE, …)
_NO_VALUE = frozenset({0xFFFFFFFE, 0xFFFFFFFFFFFFFFFE})
_INFINITE = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


def limit(value: Any) -> float | None:
    """Return a number that may be ``math.inf``; None when it is not set or not a number."""
    if isinstance(value, dict):
        if value.get("infinite") is True:
            return math.inf
        return limit(value.get("number")) if value.get("set", True) is True else None
    if isinstance(value, str):
        return limit(int(value)) if value.isdecimal() and len(value) < 20 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    if value in _INFINITE:
        return math.inf
    if value in _NO_VALUE:
        return None
    return value if isinstance(value, int) and abs(value) < 1 << 63 else _finite(value)


def _finite(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return None


def whole(value: Any) -> int | None:
    """Return a whole number; None when it is not set, has no limit, or is not a number."""
    number = value if type(value) is int and 0 <= value < 0xFFFFFFFE else limit(value)
    return None if number is None or math.isinf(number) else int(number)


def moment(value: Any) -> int | None:
    """Return a time in Unix seconds; None for never (Slurm's 0)."""
    return whole(value) or None


def text(value: Any) -> str:
    """Return a string; "" for null and everything else."""
    return value if isinstance(value, str) else ""


def texts(value: Any) -> tuple[str, ...]:
    """Return the strings of a list, or of a string with commas."""
    if isinstance(value, str):
        return tuple(part for part in value.split(",") if part and part != "(null)")
    return tuple(part for part in value if isinstance(part, str)) if isinstance(value, list) else ()
