"""Keeps the tracebacks of echoes off the console: errors that ranks raise because another rank or node has ended.

A rank records its uncaught exception in its error file before it prints the traceback. So text is held back only where
it is that traceback, line by line, and the error reads like an echo. It is dropped when the controller names the cause,
and shown when the rank itself is the cause, or when no word comes in time. The rank's log file has it in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct, field

from resilio_hpc.core.rank_error import without_controls
from resilio_hpc.launch.protocol.message_parts import Cause
from resilio_hpc.launch.protocol.root_cause import place_of, reads_like_echo
from resilio_hpc.launch.workers.output.error_file import RankError

HOLD_S = 10.0  # the controller waits a second for a cause; where processors are short, its word takes some more
MOST_BYTES = 256 * 1024
HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = "  + Exception Group Traceback (most recent call last):"
_OF_TORCH = re.compile(r"\[rank\d+\]: ")  # torch.distributed's excepthook writes it before each line


class RoundEnd(Struct):
    """What ended a round. ``known``: the controller has said so; it may not know a cause."""

    known: bool = False
    cause: Cause | None = None

    def judge(self, cause: Cause | None) -> None:
        """Take the controller's word; its first one counts."""
        if not self.known:
            self.known, self.cause = True, cause

    def is_echo(self, rank: int, error: RankError) -> bool | None:
        """Return whether an error that reads like an echo is one; None while the cause is not known."""
        if not self.known:
            return None
        cause = self.cause
        if cause is None or cause.rank == rank:
            return False
        # where all ranks report broken connections, only those that stopped in the same line add nothing
        return not cause.reads_like_echo or place_of(error.traceback) == cause.place


class _Held(Struct):
    """A traceback that is being held back, and what its rank wrote after it."""

    error: RankError
    recorded: list[str]
    since: float
    matched: int = 0
    size: int = 0
    lines: list[bytes] = field(default_factory=list)
    later: list[bytes] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.matched == len(self.recorded)

    def take(self, line: bytes) -> bool:
        """Take the next line. Return False where it is not the next one of the recorded traceback."""
        self.size += len(line)
        if self.complete:
            self.later.append(line)
            return True
        self.lines.append(line)
        text = _plain(line)
        if text == self.recorded[self.matched]:
            self.matched += 1
            return True
        # a script's own ``record`` writes the frames from its own on; the interpreter prints those before, too
        own_record = self.matched == 1 and text.startswith("  ")
        cut_off = bool(text) and self.recorded[self.matched].startswith(text)  # a rank is killed while it prints
        return own_record or cut_off


class EchoFolder:
    """One stream of one rank: takes its lines, returns those to show."""

    def __init__(self, rank: int, read_error: Callable[[], RankError | None], end: RoundEnd) -> None:
        self._rank = rank
        self._read_error = read_error
        self._end = end
        self._held: _Held | None = None

    def take(self, line: bytes, now: float) -> list[bytes]:
        """Return what is to be shown now. ``now``: monotonic seconds."""
        held = self._held or self._begin(line, now)
        if held is None:
            return [line]
        self._held = held
        return self.due(now) if held.take(line) and held.size < MOST_BYTES else self._release()

    def _begin(self, line: bytes, now: float) -> _Held | None:
        """Begin to hold back, where the line begins the traceback of an error that may be an echo."""
        if not line.endswith(b"(most recent call last):") or _plain(line) not in (HEADER, _GROUP_HEADER):
            return None
        error = self._read_error()  # the file of a rank whose error was caught does not exist
        if error is None or not reads_like_echo(error.message) or self._end.is_echo(self._rank, error) is False:
            return None
        recorded = error.traceback.rstrip().splitlines()
        return _Held(error, recorded, now) if recorded else None

    def due(self, now: float) -> list[bytes]:
        """Return what was held back and is to be shown now."""
        held = self._held
        if held is None:
            return []
        echo = self._end.is_echo(self._rank, held.error)
        if echo and held.complete:
            self._held = None
            return held.later
        late = echo is None and now - held.since > HOLD_S
        return self._release() if echo is False or late else []

    def close(self) -> list[bytes]:
        """Return the rest at the end of the stream. A rank may be killed while it prints."""
        held = self._held
        if held is not None and self._end.is_echo(self._rank, held.error):
            self._held = None
            return held.later
        return self._release()

    def _release(self) -> list[bytes]:
        held, self._held = self._held, None
        return [] if held is None else held.lines + held.later


def _plain(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    return without_controls(_OF_TORCH.sub("", text, count=1) if text.startswith("[rank") else text)
