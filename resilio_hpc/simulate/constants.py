"""What a simulated run takes: numbers, each with its source. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec

from resilio_hpc.core.compat import StrEnum, tomllib
from resilio_hpc.core.errors import UsageError


class SourceKind(StrEnum):
    """Where a number comes from, the most certain first."""

    GIVEN = "given"
    MEASURED = "measured"
    PUBLISHED = "published"
    PRODUCT = "product"
    GUESS = "guess"


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A number. ``value``: None where it is not known."""

    name: str
    kind: SourceKind
    source: str
    text: str
    unit: str = ""
    value: float | None = None


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    constant: list[Constant]


class Constants:
    """All numbers of a simulation, by name. ``used``: the names that a run has asked for."""

    def __init__(self, rows: Iterable[Constant]) -> None:
        self._rows = {row.name: row for row in rows}
        self.used: set[str] = set()

    def known(self, name: str) -> float | None:
        """Return a number, None where it is not known."""
        self.used.add(name)
        return self._rows[name].value

    def __getitem__(self, name: str) -> float:
        """Return a number that has a value."""
        value = self.known(name)
        assert value is not None, name
        return value

    def us(self, name: str) -> int:
        """Return a number of seconds as whole microseconds."""
        return round(self[name] * 1e6)

    def extrapolated(self, name: str, what: str) -> Constants:
        """Return the numbers with one that is published for other sizes called a guess."""
        row = self._rows[name]
        if row.kind is not SourceKind.PUBLISHED or row.value is None:
            return self
        return self.replaced({name: row.value}, SourceKind.GUESS, f"{row.source}; {what}")

    def rows(self) -> list[Constant]:
        """Return those that runs have asked for."""
        return [row for name, row in self._rows.items() if name in self.used]

    def names(self) -> list[str]:
        """Return the names of all."""
        return list(self._rows)

    def replaced(self, values: Mapping[str, float], kind: SourceKind, source: str) -> Constants:
        """Return the numbers with others in place of some. Raises UsageError for a name or value that cannot be."""
        rows = dict(self._rows)
        for name, value in values.items():
            if name not in rows:
                raise UsageError(f"no constant is named {name}: {', '.join(rows)}")
            rows[name] = msgspec.structs.replace(rows[name], value=_checked(name, value), kind=kind, source=source)
        return Constants(rows.values())


def _checked(name: str, value: float) -> float:
    most = 1.0 if name.endswith("_share") else 1e9
    if not (math.isfinite(value) and 0 <= value <= most):
        raise UsageError(f"{name}={value:g}: a number from 0 to {most:g} is needed")
    if value == 0 and name in ("step_s", "store_gb_s"):
        raise UsageError(f"{name} must be more than 0")
    return value


@functools.cache
def _rows() -> tuple[Constant, ...]:
    text = resources.files(__package__).joinpath("constants.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text), _Table).constant)


def defaults() -> Constants:
    """Return the numbers that come with the package."""
    return Constants(_rows())


def table(name: str) -> dict[str, Any]:
    """Return a TOML table of this package."""
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
