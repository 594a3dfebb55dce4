"""The table of checks: ``checks/*.toml`` as shipped, overridden by the site's.

A site's file names checks and the differences, such as ``[disk-space]`` with ``on_fail = "warn"`` or
``limits.free_percent = 2``. An unknown or misspelt name is an error, never silently another check.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.check import Check, Limit, Thresholds

SHIPPED = Path(__file__).parents[1] / "checks"
SITE = Path("/etc/resilio/health.toml")
_CHANGEABLE = ("contexts", "budget_s", "on_fail", "on_timeout", "severity", "every_s", "enabled", "limits")
_LONGEST_BUDGET_S = 120.0


@dataclass(frozen=True)
class Table:
    """All checks by name, in the order of the files, and the settings of sources that several checks share."""

    checks: Mapping[str, Check]
    settings: Mapping[str, Thresholds]

    def check(self, name: str) -> Check:
        """Return the check of that name. Raises UsageError with the nearest one."""
        if name not in self.checks:
            raise UsageError(f"no check is named {name!r}{_near(name, list(self.checks))}")
        return self.checks[name]


def load(site: Path | None = None, shipped: Path = SHIPPED) -> Table:
    """Load the shipped tables, overridden by ``site`` (default: /etc/resilio/health.toml, if it exists).

    Raises UsageError.
    """
    checks: dict[str, Check] = {}
    settings: dict[str, dict[str, Limit]] = {}
    for path in sorted(shipped.glob("*.toml")):
        content = _read(path)
        for row in content.get("check", []):
            check = _converted(row, str(path))
            if check.id in checks:
                raise UsageError(f"{path}: two checks are named {check.id}")
            checks[check.id] = check
        settings |= content.get("settings", {})
    if site is not None or SITE.exists():
        overlay(checks, settings, _read(site or SITE), str(site or SITE))
    return Table(checks, {name: Thresholds(values) for name, values in settings.items()})


def overlay(
    checks: dict[str, Check], settings: dict[str, dict[str, Limit]], site: Mapping[str, Any], name: str
) -> None:
    """Apply a site's changes to the shipped rows, in place. Raises UsageError. Pure otherwise."""
    for key, changes in site.items():
        if key == "settings":
            for source, values in _tables(changes, f"{name}: [settings]").items():
                if source not in settings:
                    raise UsageError(f"{name}: no settings are named {source!r}{_near(source, list(settings))}")
                settings[source] = _changed(settings[source], values, f"{name}: [settings.{source}]")
            continue
        if key not in checks:
            raise UsageError(f"{name}: no check is named {key!r}{_near(key, list(checks))}")
        checks[key] = _check_changed(checks[key], _tables({key: changes}, name)[key], f"{name}: [{key}]")


def _check_changed(check: Check, changes: Mapping[str, Any], where: str) -> Check:
    unknown = [key for key in changes if key not in _CHANGEABLE]
    if unknown:
        raise UsageError(f"{where}: {unknown[0]!r} cannot be set{_near(unknown[0], list(_CHANGEABLE))}")
    given = dict(changes)
    if "limits" in given:
        given["limits"] = _changed(check.limits, _tables({"limits": given["limits"]}, where)["limits"], where)
    return _converted({**msgspec.to_builtins(check), **given}, where)


def _changed(limits: Mapping[str, Limit], changes: Mapping[str, Any], where: str) -> dict[str, Limit]:
    for name, value in changes.items():
        if name not in limits:
            raise UsageError(f"{where}: no limit is named {name!r}{_near(name, list(limits))}")
        if _kind(value) != _kind(limits[name]):
            raise UsageError(f"{where}: {name} = {value!r}: give {_kind(limits[name])}, as in {limits[name]!r}")
    return {**limits, **changes}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number" if math.isfinite(value) else "nothing"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "a list of texts"
    return "nothing"


def _converted(row: Mapping[str, Any], where: str) -> Check:
    try:
        check = msgspec.convert(row, Check)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error
    if not 0 < check.budget_s <= _LONGEST_BUDGET_S:
        raise UsageError(f"{where}: budget_s = {check.budget_s:g}: give more than 0 and at most {_LONGEST_BUDGET_S:g}")
    if not 1 <= check.every_s <= 86_400:
        raise UsageError(f"{where}: every_s = {check.every_s:g}: give 1 to 86400")
    return check


def _tables(value: object, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in value.values()):
        raise UsageError(f"{where}: give a table, such as [disk-space]")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f": did you mean {near[0]}?" if near else f": there are {', '.join(names)}"
