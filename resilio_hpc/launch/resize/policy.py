"""The numbers behind a decision to resize: ``resize_policy.toml``, and a site's or user's values in their place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

DEFAULTS = Path(__file__).with_name("resize_policy.toml")
_SHARES = ("min_efficiency", "communication_share", "shrink_below", "low_utilisation")


@dataclass(frozen=True)
class ResizePolicy:
    """The values of ``resize_policy.toml``. Times in seconds, shares from 0 to 1."""

    look_s: float
    min_gain: float
    min_efficiency: float
    payback: float
    horizon_s: float
    communication_share: float
    restart_s: float
    settle_s: float
    cool_down_s: float
    shrink_below: float
    leave_patience_s: float
    pending_patience_s: float
    low_utilisation: float
    max_joiner_jobs: int
    max_user_nodes: int
    max_lost_joiners: int
    lost_joiners_s: float
    reshape_successor: bool


def resize_policy(path: Path | None = None) -> ResizePolicy:
    """Return the policy; ``path``: a file with other values. Raises UsageError."""
    own = {} if path is None else _read(path)
    kinds = {field.name: str(field.type) for field in fields(ResizePolicy)}
    unknown = sorted(own.keys() - kinds.keys())
    if unknown:
        raise UsageError(
            f"{path}: no number of the resize policy is called {unknown[0]!r}; there are {', '.join(kinds)}"
        )
    values = {**_defaults(), **own}
    for name, value in values.items():
        _check(name, value, kinds[name])
    return ResizePolicy(**values)  # type: ignore[arg-type]  # each was checked


def _check(name: str, value: object, kind: str) -> None:
    if kind == "bool":
        if not isinstance(value, bool):
            raise UsageError(f"resize policy: {name} is true or false, not {value!r}")
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (kind == "float" and isinstance(value, float))) or not 0 <= float(str(value)) < float("inf"):
        what = "a whole number" if kind == "int" else "a number"
        raise UsageError(f"resize policy: {name} is {what} of at least 0, not {value!r}")
    if name in _SHARES and float(str(value)) > 1:
        raise UsageError(f"resize policy: {name} is a share from 0 to 1, not {value!r}")


@cache
def _defaults() -> dict[str, object]:
    return _read(DEFAULTS)


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
