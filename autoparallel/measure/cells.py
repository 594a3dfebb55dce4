"""The cells of one row of a table: numbers checked, defaults noted, words that say nothing taken as empty."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resilio_hpc.core.errors import UsageError

LARGEST = 10**12
# "NS (none likely)" is a guess of the table's author, not a value of its source
_NOTHING = re.compile(
    r"(ns|n\.s\.|n/?a|not[ _-](stated|given|reported|known)|unstated|unknown|tbd|\?+|-+|–|—)(?![\w/.-])", re.IGNORECASE
)


class Cells:
    """The cells of one row: numbers checked, defaults noted."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """Return the cell; "" where it says that its source states nothing."""
        text = (self.row.get(name) or "").strip()
        return "" if _NOTHING.match(text) else text

    def stated(self, name: str) -> bool:
        """Return whether the cell holds a value from its source."""
        return bool(self.text(name)) and name not in re.split("[;,]", self.text("not_stated"))

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number, or the default; UsageError without either."""
        text = self.text(name)
        if not text:
            if default is None:
                raise UsageError(f"{name} is empty")
            self.assumed.append(f"{name}={default}")
            return default
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{name} = {text[:40]!r} is no number") from None
        if not 1 <= value <= LARGEST or value != int(value):
            raise UsageError(f"{name} = {text[:40]!r} is no whole number from 1 to {LARGEST:g}")
        return int(value)
