"""What an alert is, and the table of all alerts (``alerts.toml``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from resilio_hpc.core.compat import StrEnum, tomllib
from resilio_hpc.core.ledger import Event

MOST_LINES = 5  # of the ledger, behind one alert


class Severity(StrEnum):
    """How much an alert matters. CRITICAL: the run stands still, is over, or will soon be."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A row of the table. ``limit``: the default of ``option``; ``above``: fires above the limit, else below it."""

    severity: Severity
    what: str
    do: str
    source: str
    limit: float | None = None
    unit: str = ""
    option: str = ""
    above: bool = False


@dataclass(frozen=True)
class Alert:
    """One alert that fires. ``since``: Unix seconds; ``about``: the node, or "" where it is the whole run's.

    ``value`` and ``limit`` in ``unit``; None where there is no number. ``lines``: of the ledger, the newest last.
    """

    name: str
    severity: Severity
    since: float
    text: str
    do: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    about: str = ""
    lines: tuple[Event, ...] = ()

    @property
    def key(self) -> str:
        """Return what tells it from the run's other alerts."""
        return f"{self.name} {self.about}".rstrip()

    @property
    def places(self) -> tuple[str, ...]:
        """Return the ledger lines behind it, as FILE:LINE."""
        return tuple(dict.fromkeys(f"{line.file}:{line.line}" for line in self.lines if line.file))


@cache
def rules() -> Mapping[str, AlertRule]:
    """Return the table, in the order of the file."""
    text = resources.files(__package__).joinpath("alerts.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {name: AlertRule(**{**row, "severity": Severity(row["severity"])}) for name, row in rows.items()}


Limits = Mapping[str, float]
"""Alert → its limit."""


def default_limits() -> dict[str, float]:
    """Return the limits of the table."""
    return {name: float(rule.limit) for name, rule in rules().items() if rule.limit is not None}


def fire(
    name: str, since: float, text: str, limits: Limits, value: float | None = None, lines: Sequence[Event] = (),
    severity: Severity | None = None, about: str = "",
) -> Alert:  # fmt: skip
    """Return an alert of the table's row ``name``; ``severity``: instead of the row's."""
    rule = rules()[name]
    return Alert(
        name, severity or rule.severity, since, text, rule.do, value, limits.get(name), rule.unit, about,
        tuple(lines[-MOST_LINES:]),
    )  # fmt: skip


def worst(alerts: Sequence[Alert]) -> Severity | None:
    """Return the worst severity; None without an alert. Pure."""
    found = {alert.severity for alert in alerts}
    return Severity.CRITICAL if Severity.CRITICAL in found else Severity.WARNING if found else None
