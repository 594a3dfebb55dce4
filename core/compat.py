"""What Python 3.10 lacks or has elsewhere; other modules import it from here."""

from __future__ import annotations

import sys
from datetime import timezone

if sys.version_info >= (3, 11):
    from enum import StrEnum

    import tomllib
else:
    from enum import Enum

    import tomli as tomllib

    class StrEnum(str, Enum):
        """An enum whose members are strings, and print as them."""

        __str__ = str.__str__


__all__ = ["NO_DIRECTORY", "SAFE_PATH", "UTC", "StrEnum", "tomllib"]

UTC = timezone.utc
SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))
"""Whether this interpreter leaves the script's or the working directory out of ``sys.path``."""
NO_DIRECTORY = ("-P",) if sys.version_info >= (3, 11) else ()
"""The interpreter's option for that; Python 3.10 has none."""
