"""Recorded output of Slurm's commands, as they print it where times are asked for in Unix seconds."""

from __future__ import annotations

import re
import time


def in_unix_seconds(text: str) -> str:
    """The same text with ``2026-11-21T16:13:45``, local time, as Unix seconds."""

    def unix(found: re.Match[str]) -> str:
        return str(round(time.mktime(time.strptime(found[0], "%Y-%m-%dT%H:%M:%S"))))

    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", unix, text)
