"""How many calls a rank has made, by operation, and how long it was in them: added up from one look to the next.

The ring has the last 2048 calls. Where a rank makes more between two looks, what the ring has stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resilio_hpc.diagnose.hangs.call_ring import CAPACITY, DTYPES, OPS, CallRing

RECORD = np.dtype([
    ("stamp", "<u8"), ("entered_ns", "<u8"), ("completed_ns", "<u8"), ("sequence", "<u8"), ("count", "<u8"),
    ("stream", "<u8"), ("group", "<u4"), ("op", "u1"), ("dtype", "u1"), ("state", "u1"), ("unused", "u1"),
    ("peer", "<i4"), ("more", "<u4"),
])  # fmt: skip
_WIDTHS = {"": 0, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "uint64": 8, "float64": 8}
_WIDTHS |= {"float8_e4m3": 1, "float8_e5m2": 1}
WIDTHS = np.array([_WIDTHS.get(name, 4) for name in DTYPES], dtype=np.float64)  # bytes of an element
MOST_ELEMENTS = 1 << 48  # a larger count is none
Records = npt.NDArray[np.void]


@dataclass
class CallCounts:
    """The sums of one rank. ``in_calls_s`` is the time in which at least one call was under way."""

    begun: int = 0
    completed: int = 0
    calls: dict[str, float] = field(default_factory=dict)
    size_bytes: dict[str, float] = field(default_factory=dict)
    in_calls_s: float = 0.0
    knows_ends: bool = False  # some library whose calls are seen to end


class CallCounter:
    """Adds up the calls of one ring."""

    def __init__(self, path: Path) -> None:
        """Open the ring. Raises OSError where there is none."""
        self.counts = CallCounts()
        self._ring = CallRing(path)
        self._looked_ns = 0

    @property
    def process(self) -> int:
        """Return the process that writes the ring."""
        return int(self._ring.process)

    def look(self, now_ns: int) -> CallCounts:
        """Return the sums up to now. ``now_ns``: of CLOCK_MONOTONIC. Raises OSError."""
        counts = self.counts
        begun, completed = self._ring.counts
        table, queued = self._ring.table()
        records = np.frombuffer(table, dtype=RECORD, count=CAPACITY)
        if begun > counts.begun:
            _add(counts, records, begun)
        ends = ~np.isin(records["group"], queued) & (records["stamp"] > 0)
        if ends.any():
            counts.knows_ends = True
            since_ns = self._looked_ns or int(records["entered_ns"][ends].min())
            counts.in_calls_s += busy_ns(records[ends], since_ns, now_ns) / 1e9
        self._looked_ns = now_ns
        counts.begun, counts.completed = max(begun, counts.begun), max(completed, counts.completed)
        return counts

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()


def _add(counts: CallCounts, records: Records, begun: int) -> None:
    """Add the calls since the last look."""
    stamps = records["stamp"]
    new = records[(stamps > counts.begun) & (stamps <= begun) & (stamps + CAPACITY > begun)]
    if not len(new):
        return
    stands_for = (begun - counts.begun) / len(new)
    ops = np.where(new["op"] < len(OPS), new["op"], 0)
    widths = WIDTHS[np.where(new["dtype"] < len(DTYPES), new["dtype"], 0)]
    elements = np.where(new["count"] < MOST_ELEMENTS, new["count"], 0)
    calls = np.bincount(ops, minlength=len(OPS))
    sizes = np.bincount(ops, weights=elements * widths, minlength=len(OPS))
    for name, number, size in zip(OPS, calls.tolist(), sizes.tolist(), strict=True):
        if number:
            counts.calls[name] = counts.calls.get(name, 0.0) + number * stands_for
            counts.size_bytes[name] = counts.size_bytes.get(name, 0.0) + size * stands_for


def busy_ns(records: Records, since_ns: int, now_ns: int) -> float:
    """Return the time between two moments in which at least one of these calls was under way. Pure.

    Where the ring begins later, its part stands for the whole.
    """
    if not len(records) or now_ns <= since_ns:
        return 0.0
    entered = records["entered_ns"].astype(np.float64)
    begins_ns = max(float(since_ns), float(entered.min()) if len(records) == CAPACITY else 0.0)
    completed = records["completed_ns"].astype(np.float64)
    ends = np.where(completed > 0, np.minimum(completed, now_ns), now_ns)
    order = np.argsort(entered, kind="stable")
    starts, ends = np.clip(entered[order], begins_ns, now_ns), np.clip(ends[order], begins_ns, now_ns)
    covered = np.concatenate(([begins_ns], np.maximum.accumulate(ends)[:-1]))
    busy = float(np.maximum(ends - np.maximum(starts, covered), 0.0).sum())
    span = now_ns - begins_ns
    return min(busy / span, 1.0) * (now_ns - since_ns) if span > 0 else 0.0
