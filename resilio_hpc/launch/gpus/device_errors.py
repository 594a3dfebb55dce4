"""Whether a rank's error reads like one of its device's hardware: ``device_errors.toml``.

Pure, except for that table.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.compat import tomllib

TABLE = Path(__file__).parent / "device_errors.toml"
TEXT_CHARACTERS = 160


@dataclass(frozen=True)
class DeviceError:
    """One row of the table. ``origin``: where its meaning is defined."""

    pattern: re.Pattern[str]
    meaning: str
    origin: str


@functools.cache
def table(path: Path = TABLE) -> tuple[DeviceError, ...]:
    """Return all rows of the table."""
    rows = tomllib.loads(path.read_text())["error"]
    return tuple(DeviceError(re.compile(row["pattern"], re.I), row["meaning"], row["origin"]) for row in rows)


def hardware_error(text: str) -> str:
    """Return what a rank's error says of its device, in one line; "" where it says nothing of the kind."""
    for row in table():
        found = row.pattern.search(text)
        if found:
            line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
            return f"{row.meaning}: {line}"[:TEXT_CHARACTERS]
    return ""
