"""The summaries of many runs. One that is damaged, or whose file system hangs, delays no other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resilio_hpc.core.errors import ResilioError, os_error_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.report.summary import RunSummary, summarise

READERS = 8  # on a shared file system each waits for answers most of the time
PATIENCE_S = 5.0  # for one run
MOST_HUNG = 32  # threads that may hang, before the rest is given up
_POLL_S = 0.02


@dataclass(frozen=True)
class UnreadRun:
    """A run directory that cannot be read, and why."""

    path: Path
    problem: str


Read = RunSummary | UnreadRun


@dataclass
class _Reader:
    """A thread that reads runs, one after the other. ``since``: when it began with ``index``."""

    index: int = -1
    since: float = 0.0
    given_up: bool = False


@dataclass
class _Work:
    paths: Sequence[Path]
    read: Callable[[Path], RunSummary]
    waiting: deque[int]
    done: dict[int, Read] = field(default_factory=dict)


def summaries(
    paths: Sequence[Path],
    now: float,
    patience_s: float = PATIENCE_S,
    read: Callable[[Path, float], RunSummary] = summarise,
) -> list[Read]:
    """Return one answer for each path, in their order; ``patience_s``: for one that does not answer."""
    work = _Work(paths, lambda path: read(path, now), deque(range(len(paths))))
    readers = [_begin(work) for _ in range(min(READERS, len(paths)))]
    hung = 0
    while len(work.done) < len(paths):
        time.sleep(_POLL_S if readers else 0.0)
        for reader in list(readers):
            index = reader.index
            if index < 0 or index in work.done or time.monotonic() - reader.since < patience_s:
                continue
            reader.given_up = True
            readers.remove(reader)
            work.done.setdefault(index, UnreadRun(paths[index], f"it was not read within {patience_s:g} s"))
            hung += 1
            if hung < MOST_HUNG:
                readers.append(_begin(work))
        if not readers:
            for index in range(len(paths)):
                work.done.setdefault(index, UnreadRun(paths[index], "it was not read: too many others do not answer"))
    return [work.done[index] for index in range(len(paths))]


def _begin(work: _Work) -> _Reader:
    reader = _Reader()
    threading.Thread(target=_read_some, args=(work, reader), name="resilio-runs", daemon=True).start()
    return reader


def _read_some(work: _Work, reader: _Reader) -> None:
    while not reader.given_up:
        try:
            index = work.waiting.popleft()
        except IndexError:
            return
        reader.since = time.monotonic()
        reader.index = index
        work.done.setdefault(index, _one(work, work.paths[index]))


def _one(work: _Work, path: Path) -> Read:
    try:
        return work.read(path)
    except ResilioError as error:
        return UnreadRun(path, printable(str(error), 500))
    except OSError as error:
        return UnreadRun(path, printable(os_error_text(error, str(path)), 500))
