"""What follows from the class of a rank's failure: the table of fault_actions.toml (OEU-1). Pure."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from resilio_hpc.core.compat import StrEnum, tomllib
from resilio_hpc.diagnose.causes.pattern_table import CauseClass
from resilio_hpc.launch.protocol.failure_class import FailureClass


class FaultAction(StrEnum):
    """What is done about a failure."""

    RESTART = "restart"
    MOVE = "move"
    STOP = "stop"
    STOP_ELSEWHERE = "stop-elsewhere"

    @property
    def stops(self) -> bool:
        """Return whether it may end the run."""
        return self in (FaultAction.STOP, FaultAction.STOP_ELSEWHERE)


class FaultRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the table; ``pattern`` or ``cause`` says for what it holds."""

    first: FaultAction
    again: FaultAction
    why: str
    cause: CauseClass | None = msgspec.field(name="class", default=None)
    pattern: str = ""
    trace: bool = False


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: list[FaultRow]


@functools.cache
def rows() -> tuple[FaultRow, ...]:
    """Return the table that comes with the package."""
    text = resources.files(__package__).joinpath("fault_actions.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text), _Table).fault)


@functools.cache
def _by_pattern() -> dict[str, FaultRow]:
    return {row.pattern: row for row in rows() if row.pattern}


@functools.cache
def _by_class() -> dict[CauseClass, FaultRow]:
    return {row.cause: row for row in rows() if row.cause is not None}


def row_of(found: FailureClass) -> FaultRow:
    """Return the row of a failure's class: that of its pattern where it has one."""
    return _by_pattern().get(found.pattern) or _by_class()[found.cause]
