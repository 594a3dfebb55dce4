"""The standard streams that a ``--redirects`` or ``--tee`` value selects (torchrun's notation)."""

from __future__ import annotations

import re
from enum import IntFlag

from resilio_hpc.core.errors import UsageError

_ONE_VALUE = re.compile(r"[0-3]")
_PER_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Std(IntFlag):
    """Standard streams as a set; the numbers are those of the command line."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_std(text: str, flag: str = "--redirects") -> Std | dict[int, Std]:
    """Return ``"3"`` → Std.ALL for every rank; ``"0:1,1:2"`` → {local rank 0: OUT, 1: ERR}. Raises UsageError."""
    if _ONE_VALUE.fullmatch(text):
        return Std(int(text))
    if not _PER_RANK.fullmatch(text):
        raise UsageError(
            f"{flag}: {text!r} is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) "
            "nor a list of LOCAL_RANK:VALUE such as 0:3,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(local_rank): Std(int(value)) for local_rank, value in pairs}


def std_of(text: str, local_rank: int) -> Std:
    """Return the streams of one local rank that ``text`` selects; a rank that a list does not name has none."""
    parsed = parse_std(text)
    return parsed.get(local_rank, Std.NONE) if isinstance(parsed, dict) else parsed
