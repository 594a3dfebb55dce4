"""Devices that the newest job does not use, from the ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event


@dataclass(frozen=True)
class OutOfUse:
    """One GPU of a node. ``index``: Slurm's, None where not known."""

    node: str
    device: str
    index: int | None
    check: str
    evidence: str
    time: float

    def __str__(self) -> str:
        which = self.device if self.index is None else f"GPU {self.index} ({self.device})"
        return f"{self.node}: {which}, {self.check}"


def out_of_use(events: Sequence[Event], since: float) -> tuple[OutOfUse, ...]:
    """Those that were evicted since the job's launch at ``since`` (Unix seconds), each once."""
    found: dict[tuple[str, str], OutOfUse] = {}
    for event in events:
        f = Fields(event.fields)
        if event.kind != "device_evicted" or event.time < since or not f.data.get("acted", True):
            continue
        index = f.whole("index")
        one = OutOfUse(
            printable(f.text("node", "?"), 60), printable(f.text("device", "?"), 80),
            index if index is not None and index >= 0 else None, printable(f.text("check", "?"), 40),
            printable(f.text("evidence"), 200), event.time,
        )  # fmt: skip
        found.setdefault((one.node, f.text("entry") or one.device), one)
    return tuple(found.values())
