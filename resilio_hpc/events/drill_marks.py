"""Which failures of a run were made on purpose (``resilio drill run --run``), by the ledger. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event

SLACK_S = 2.0  # by which nodes' clocks may differ
LONGEST_S = 3600.0  # from a drill to the failure that it makes: a hang may take its limit to be found


@dataclass(frozen=True)
class DrillMark:
    """A drill that was done. ``rank``: -1 where it was an agent. ``time`` in Unix seconds."""

    fault: str
    node: str
    rank: int
    by: str
    time: float


class DrillMarks:
    """The drill whose failure is still to come, or not yet over. ``take`` hears all events in the order of time."""

    def __init__(self) -> None:
        self._open: DrillMark | None = None

    def take(self, event: Event) -> None:
        """Take note of a drill, and of the recovery that ends it."""
        f = Fields(event.fields)
        if event.kind == "drill":
            if not f.text("why"):
                rank = f.whole("rank")
                self._open = DrillMark(
                    f.text("fault"), f.text("node"), -1 if rank is None else rank, f.text("by"), event.time
                )
        elif event.kind in ("recovered", "rank_restarted", "launch", "verdict"):
            self._open = None

    def of(self, node: str, time: float) -> DrillMark | None:
        """Return the drill that made a failure on this node; ``time`` of the failure, Unix seconds."""
        mark = self._open
        if mark is None or node != mark.node or not mark.time - SLACK_S <= time <= mark.time + LONGEST_S:
            return None
        return mark
