"""From a rank's growing log file to whole, harmless lines on a console that may be stuck."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from resilio_hpc.launch.workers.output.echoes import EchoFolder
from resilio_hpc.launch.workers.output.shown_streams import Shown

MAX_LINE_BYTES = 32 * 1024  # a longer line is written in pieces of this size, so that memory stays bounded
_READ_BYTES = 64 * 1024
_PENDING_BYTES = 256 * 1024  # read, and not yet taken by the console
LAST_BYTES = 16 * 1024  # the end of a stream that is shown no further
PROGRESS_EVERY_S = 5.0
_UNPRINTABLE = re.compile("(\x1b\\[[0-9;]*m)|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# poll(2) reports a pipe as writable when PIPE_BUF bytes fit; more could block
_SAFE_WRITE = select.PIPE_BUF


class Lines:
    """Splits bytes into whole lines without line ends; a line that is too long is split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            for start in range(0, len(line) or 1, MAX_LINE_BYTES):
                yield line[start : start + MAX_LINE_BYTES]
        while len(self._rest) > MAX_LINE_BYTES:
            yield self._rest[:MAX_LINE_BYTES]
            self._rest = self._rest[MAX_LINE_BYTES:]

    def progress(self) -> Iterator[bytes]:
        """Yield the last complete state of a progress bar, which rewrites its line after ``\r`` and may not end it."""
        states, _, newest = self._rest.rpartition(b"\r")
        if states and newest:  # nothing after \r: it may be half of a Windows line end
            self._rest = newest
            yield states

    def end(self) -> Iterator[bytes]:
        """Yield the last line if it has no line end."""
        if self._rest:
            yield self._rest
        self._rest = b""


def printable(line: bytes) -> bytes:
    """Return valid UTF-8 with tabs and colours.

    Other control characters become ``?``. Of states separated by ``\r``, the last one is kept.
    """
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return _UNPRINTABLE.sub(lambda found: found[1] or "?", text).encode(errors="replace")


class ConsoleSink:
    """A file descriptor that may block; only as many bytes are written as it takes at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = bytearray()
        self._broken = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        """Return whether nothing more should be read until some of it is written."""
        return len(self._pending) >= _PENDING_BYTES

    @property
    def empty(self) -> bool:
        """Return whether everything was written, or given up."""
        return not self._pending

    def put(self, data: bytes) -> None:
        """Queue bytes; after the reader is gone, drop them."""
        if not self._broken:
            self._pending += data

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what fits; wait at most ``wait_s`` until a first piece fits."""
        while self._pending and self._poll.poll(wait_s * 1000):
            wait_s = 0.0
            try:
                written = os.write(self._fd, self._pending[:_SAFE_WRITE])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone; the files hold everything
                self._broken = True
                self._pending.clear()
                return
            del self._pending[:written]


class LogTail:
    """One stream of one rank."""

    def __init__(
        self, path: Path, how: Shown, console: ConsoleSink, duplicate: BinaryIO | None, folder: EchoFolder | None
    ) -> None:
        self._path, self._how, self._console, self._duplicate, self._folder = path, how, console, duplicate, folder
        self._now = 0.0
        self._fd = -1
        self._lines = Lines()
        self._last_progress = -PROGRESS_EVERY_S

    def read(self, now: float) -> bool:
        """Print one piece. Return False at the present end of the file."""
        if self._console.full:
            return True
        self._now = now
        if self._folder is not None:
            self._show(self._folder.due(now))
        data = self._next_piece()
        if data:
            self._pass_on(self._lines.feed(data))
        if now - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = now
            self._pass_on(self._lines.progress())
        return bool(data)

    def _next_piece(self) -> bytes:
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            data = os.read(self._fd, _READ_BYTES)
            return self._behind_hole(len(data)) if data.startswith(b"\0") else data
        except OSError:  # the file does not exist yet
            return b""

    def _behind_hole(self, size: int) -> bytes:
        """Return what follows the bytes of a long log that were freed meanwhile: the run directory has them."""
        here = os.lseek(self._fd, -size, os.SEEK_CUR)
        left_out = os.lseek(self._fd, here, os.SEEK_DATA) - here
        if left_out:
            self._pass_on(self._lines.end())
            if self._how.on_console:
                self._console.put(f"[resilio] {left_out} bytes are left out here: the rank's log has them\n".encode())
        return os.read(self._fd, _READ_BYTES)

    def leave_out(self, logs: Path) -> None:
        """Skip to the last lines, and print how much is skipped. ``logs``: the files that hold all of it."""
        if self._fd < 0:
            return
        here = os.lseek(self._fd, 0, os.SEEK_CUR)
        end = os.fstat(self._fd).st_size
        if end - here > LAST_BYTES:
            self._pass_on(self._lines.end())
            os.lseek(self._fd, end - LAST_BYTES, os.SEEK_SET)
            partial = os.read(self._fd, LAST_BYTES).partition(b"\n")[2]
            left_out = end - here - len(partial)
            whole = logs / self._path.parent.parent.name / self._path.parent.name / self._path.name
            if self._how.on_console:
                self._console.put(f"[resilio] {left_out} bytes are left out here: {whole} has them\n".encode())
            self._pass_on(self._lines.feed(partial))
        while data := self._next_piece():
            self._pass_on(self._lines.feed(data))

    def close(self) -> None:
        """Print the last line, though it has no end, and what was held back."""
        self._pass_on(self._lines.end())
        if self._folder is not None:
            self._show(self._folder.close())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _pass_on(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            self._show([line] if self._folder is None else self._folder.take(line, self._now))
            if self._duplicate and any(word in line for word in self._how.words):
                self._duplicate.write(self._how.prefix + printable(line) + b"\n")

    def _show(self, lines: Sequence[bytes]) -> None:
        if self._how.on_console:
            for line in lines:
                self._console.put(self._how.prefix + printable(line) + b"\n")


def last_line(path: Path) -> str:
    """Return the last line of a small text file, for a message."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
