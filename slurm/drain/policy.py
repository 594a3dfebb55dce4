"""The values of drain_policy.toml, or of a site's own file. Pure, except for reading the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

_DEFAULTS = Path(__file__).with_name("drain_policy.toml")


class DrainPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values. ``share``: of a partition, 0 to 1; ``window_s``: seconds; ``passes``: of a check, in a row.

    ``check_…``: of nodes that are held for one check (1: no limit).
    """

    share: float
    at_least: int
    window_s: float
    passes: int
    check_share: float = 1.0
    check_at_least: int = 2

    def __post_init__(self) -> None:
        for share in (self.share, self.check_share):
            if not 0 <= share <= 1:
                raise ValueError(f"a share is from 0 to 1, not {share:g}")
        if min(self.at_least, self.check_at_least) < 0 or self.passes < 1 or self.window_s < 0:
            raise ValueError("at_least and window_s are not below 0, passes not below 1")


def drain_policy(file: Path | None = None) -> DrainPolicy:
    """Return the defaults, overridden by ``file``. Raises UsageError."""
    values = tomllib.loads(_DEFAULTS.read_text())
    try:
        if file is not None:
            values |= tomllib.loads(file.read_text())
        return msgspec.convert(values, DrainPolicy)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: not a drain policy: {error}") from error
