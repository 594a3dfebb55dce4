"""Slurm's settings that matter to runs: the rows of ``slurm_settings.toml``, applied to a configuration. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from resilio_hpc.core.compat import tomllib
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState

_TABLE = Path(__file__).with_suffix(".toml")
_UNSET = ("", "(null)", "N/A")
_NO_LIMIT = ("65534", "65534 sec", "INFINITE", "UNLIMITED")


@dataclass(frozen=True)
class SlurmSetting:
    """A row of the table, whose head explains its fields."""

    name: str
    fails_if: str
    state: DoctorState
    means: str
    todo: str
    source: str
    when: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def table() -> tuple[SlurmSetting, ...]:
    """Return the rows."""
    rows = tomllib.loads(_TABLE.read_text())["setting"]
    return tuple(SlurmSetting(**{**row, "state": DoctorState(row["state"])}) for row in rows)


def judge(config: Mapping[str, str], rows: tuple[SlurmSetting, ...] | None = None) -> list[DoctorFinding]:
    """Return a finding for each setting that is wrong; a setting that this Slurm does not have is fine."""
    found = []
    for row in table() if rows is None else rows:
        value = config.get(row.name)
        others = all(is_so(config.get(name, ""), rule) for name, rule in row.when.items())
        if value is not None and others and is_so(value, row.fails_if):
            found.append(DoctorFinding(row.state, f"{row.name}={value}", row.means, row.todo, row.name))
    return found


def is_so(value: str, rule: str) -> bool:
    """Return whether a value is as a rule of the table says. Raises ValueError for no rule."""
    kind, _, rest = rule.partition(" ")
    match kind:
        case "set":
            return value not in _UNSET
        case "is":
            return value in rest.split("|")
        case "lacks":
            return rest not in re.split(r"[,\s]+", value)
        case "zero":
            return _number(value) == 0
        case "unlimited":
            return value in _NO_LIMIT
        case "below":
            number = _number(value)
            return number is not None and 0 < number < int(rest)
    raise ValueError(f"{_TABLE.name}: no such rule: {rule!r}")


def _number(value: str) -> int | None:
    """Return the number of ``30 sec``, ``300``, or the ports of ``60001-60050``; None for other texts."""
    if span := re.fullmatch(r"(\d{1,9})-(\d{1,9})", value):
        low, high = int(span[1]), int(span[2])
        return high - low + 1 if high else 0
    found = re.match(r"\d{1,9}(?=$|\s)", value)
    return int(found[0]) if found and value not in _NO_LIMIT else None
