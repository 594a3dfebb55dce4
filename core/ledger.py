"""The ledger: append-only JSON lines of what happened, one file per writer, so no locks are needed.

A line is ``{"v": 1, "time": unix seconds, "writer": name, "event": kind, ...}``. Readers ignore fields they do not
know and skip a torn last line (a writer may have been killed in the middle of it).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Event:
    """One ledger line. ``time`` is in Unix seconds of the writer's clock; ``fields`` is the rest."""

    time: float
    writer: str
    kind: str
    fields: dict[str, Any]


class Ledger:
    """Appends events to ``directory/<writer>.jsonl``. Each event is one write(2) of one whole line."""

    def __init__(self, directory: Path, writer: str, clock: Callable[[], float] = time.time) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = writer
        self._clock = clock
        self._fd = os.open(directory / f"{writer}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Record one event; ``fields`` must be JSON values."""
        line = {"v": VERSION, "time": round(self._clock(), 6), "writer": self._writer, "event": kind, **fields}
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file; later appends fail."""
        os.close(self._fd)


def read_ledger(directory: Path) -> list[Event]:
    """All events of all writers in a ledger directory, by time."""
    events: list[Event] = []
    for path in sorted(directory.glob("*.jsonl")):
        events.extend(_read_file(path))
    return sorted(events, key=lambda event: event.time)


def _read_file(path: Path) -> Iterator[Event]:
    with path.open(errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                yield Event(line.pop("time"), line.pop("writer"), line.pop("event"), line)
            except (ValueError, KeyError, AttributeError):
                continue  # a torn line: its writer died while writing it
