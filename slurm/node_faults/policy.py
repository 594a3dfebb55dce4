"""The values of policy.toml, overridden by a site's own. Pure, except for reading the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

_DEFAULTS = Path(__file__).with_name("policy.toml")


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``counts``: the weight of one such fault; within ``once_per_s`` seconds several count as one."""

    counts: float
    once_per_s: float
    meaning: str = ""
    source: str = ""


class WeightStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From a score of ``at`` on, ``add`` is added to the node's own weight in Slurm."""

    at: float
    add: int


class FaultPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values of policy.toml."""

    half_life_days: float
    shared_nodes: int
    shared_within_s: float
    most_per_run: int
    exclude_at: float
    exclude_share: float
    exclude_at_least: int
    drain_at: float
    undrain_below: float
    weights: tuple[WeightStep, ...]
    kinds: dict[str, Kind]

    def __post_init__(self) -> None:
        if self.half_life_days <= 0 or self.shared_nodes < 2 or self.most_per_run < 1:
            raise ValueError("half_life_days is above 0, shared_nodes at least 2, most_per_run at least 1")
        if not 0 <= self.exclude_share <= 1 or self.exclude_at_least < 0:
            raise ValueError("exclude_share is from 0 to 1, exclude_at_least not below 0")
        if not 0 < self.undrain_below <= self.drain_at or self.exclude_at <= 0:
            raise ValueError("exclude_at and undrain_below are above 0, drain_at not below undrain_below")
        if any(step.at <= 0 or not 0 <= step.add < 1 << 31 for step in self.weights):
            raise ValueError("a step of weights has at above 0 and add from 0 to 2147483647")

    @property
    def half_life_s(self) -> float:
        return self.half_life_days * 86400.0

    def added_weight(self, score: float) -> int:
        """Return what a score adds to a node's weight."""
        return max((step.add for step in self.weights if score >= step.at), default=0)


def fault_policy(file: Path | None = None) -> FaultPolicy:
    """Return the defaults, overridden by ``file``. Raises UsageError."""
    values = tomllib.loads(_DEFAULTS.read_text())
    try:
        if file is not None:
            values = _laid_over(values, tomllib.loads(file.read_text()))
        return msgspec.convert(values, FaultPolicy)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: not a policy for nodes' faults: {error}") from error


def _laid_over(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Override tables by key, everything else as a whole."""
    merged = dict(values)
    for key, value in own.items():
        old = merged.get(key)
        merged[key] = _laid_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
