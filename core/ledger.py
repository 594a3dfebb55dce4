"""The ledger: append-only JSON lines of events, one file per writer, so no locks are needed.

A line is ``{"v": 1, "time": unix seconds, "writer": name, "event": kind, ...}``. Readers ignore unknown fields and skip
other lines: a writer may have been killed in the middle of one.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.json_fields import Fields, parse_object

VERSION = 1
MAX_LINE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: thousands of nodes that come make as many lines


@dataclass(frozen=True)
class Event:
    """One ledger line. ``time``: Unix seconds of the writer's clock; ``fields``: the rest.

    ``file``, ``line``: where it stands, counted from 1; "" and 0 where it was not read from a ledger.
    """

    time: float
    writer: str
    kind: str
    fields: dict[str, Any]
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)


class Ledger:
    """Appends events to ``directory/<writer>.jsonl``. Each event is one write(2) of one whole line."""

    def __init__(self, directory: Path, writer: str, clock: Callable[[], float] = time.time) -> None:
        trusted_files.make_directory(directory)
        self._writer = writer
        self._clock = clock
        self._fd = trusted_files.open_file(directory / f"{writer}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Record one event; ``fields`` must be JSON values. A field ``time`` replaces the time of writing."""
        line = {"v": VERSION, "time": round(self._clock(), 6), "writer": self._writer, "event": kind, **fields}
        os.write(self._fd, _ENCODER.encode(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file; later appends fail."""
        os.close(self._fd)


class LedgerReader:
    """Reads a ledger directory as it grows: each ``read_new`` returns the events since the last, by time.

    ``kinds``: only these are returned, and the last line of each file, which tells until when it was written. The
    lines of other kinds are not even parsed.
    """

    def __init__(self, directory: Path, kinds: Collection[str] | None = None) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # bytes of whole lines
        self._lines: dict[Path, int] = {}
        self._kinds = kinds
        self._wanted = None if kinds is None else _wanted(kinds)

    def read_new(self) -> list[Event]:
        """Return new events of all writers. Unreadable files are skipped. Raises Untrusted."""
        try:
            paths = sorted(path for path in self._directory.iterdir() if path.suffix == ".jsonl")
        except OSError:
            return []
        events = [event for path in paths for event in self._new_events(path)]
        return sorted(events, key=lambda event: event.time)

    def _new_events(self, path: Path) -> Iterator[Event]:
        number, done, block = self._lines.get(path, 0), 0, b""
        for block in self._new_blocks(path):
            for place, line in self._lines_in(block):
                event = parse_event(line, path.name, number + place)
                if event is not None and (self._kinds is None or event.kind in self._kinds):
                    done = event.line
                    yield event
            number += block.count(b"\n")
            self._lines[path] = number
        if self._kinds is not None and block and done != number:
            last = parse_event(block[:-1].rpartition(b"\n")[2], path.name, number)
            if last is not None:
                yield last

    def _lines_in(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Return (number in the block from 1, line) of all lines, or of those that may be of the wanted kinds."""
        if self._wanted is None:
            yield from enumerate(block.split(b"\n")[:-1], 1)
            return
        end, number = 0, 0  # of what is done
        for found in self._wanted.finditer(block):
            if found.start() < end:
                continue  # in the same line
            begin = block.rfind(b"\n", end, found.start()) + 1 or end
            number += block.count(b"\n", end, begin) + 1
            end = block.index(b"\n", found.start()) + 1
            yield number, block[begin : end - 1]

    def _new_blocks(self, path: Path) -> Iterator[bytes]:
        try:
            with open(path, "rb", buffering=0, opener=_open) as file:
                yield from self._blocks_of(path, file)
        except OSError:  # a directory, no permission, a file system that fails: the other files are read
            return

    def _blocks_of(self, path: Path, file: io.FileIO) -> Iterator[bytes]:
        """Return whole lines, many at once; an empty one stands for what is too long for a line."""
        status = os.fstat(file.fileno())
        done = self._read.get(path, 0)
        if status.st_size <= done:
            return
        file.seek(done)
        rest, skipping = b"", False
        while piece := file.read(min(_PIECE_BYTES, status.st_size)):
            block, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                done += len(block) + 1
                if skipping:  # the first line is the end of one that is dropped
                    block, skipping = b"\n".join([b"", *block.split(b"\n", 1)[1:]]), False
                self._read[path] = done
                yield block + b"\n"
            if len(rest) > MAX_LINE_BYTES:  # no ledger line: it is dropped piece by piece
                done += len(rest)
                rest, skipping = b"", True
                self._read[path] = done


def _open(path: str, flags: int) -> int:
    return trusted_files.open_file(Path(path), flags)


def _wanted(kinds: Collection[str]) -> re.Pattern[bytes]:
    """Return what the lines of these kinds hold, and hardly any others."""
    names = "|".join(re.escape(kind) for kind in kinds)
    return re.compile(rf'"event"[ \t]*:[ \t]*"(?:{names})"'.encode())


def parse_event(line: str | bytes, file: str = "", number: int = 0) -> Event | None:
    """Return the event of line ``number`` of ``file``, or None. Pure."""
    data = parse_object(line)
    if data is None:
        return None
    fields = Fields(data)
    at, writer, kind = fields.time("time"), fields.text("writer"), fields.text("event")
    if at is None or not kind:
        return None
    rest = {name: value for name, value in data.items() if name not in ("time", "writer", "event")}
    return Event(at, writer, kind, rest, file, number)


def read_ledger(directory: Path, kinds: Collection[str] | None = None) -> list[Event]:
    """Return all events of all writers in a ledger directory, by time; ``kinds``: as in ``LedgerReader``."""
    return LedgerReader(directory, kinds).read_new()
