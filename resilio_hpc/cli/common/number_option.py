"""Options that are numbers within bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from resilio_hpc.core.json_fields import printable


def number(least: float, most: float, whole: bool = False) -> Callable[[str], float]:
    """Return what reads such an option, for argparse; it refuses others by saying what is needed."""

    def read(value: str) -> float:
        try:
            found: float = int(value) if whole else float(value)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            kind = "a whole number" if whole else "a number"
            raise argparse.ArgumentTypeError(f"{printable(value, 60)!r}: {kind} from {least:g} to {most:g} is needed")
        return found

    return read
