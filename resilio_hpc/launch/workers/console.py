"""The ranks' output on the agent's console: reads their log files and prints whole lines, each with its rank.

``poll()`` never blocks: files are read in bounded pieces, and no more is read while the console (a pipe to srun,
perhaps stuck) has not taken the last piece. The log files hold everything in any case.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import BinaryIO

from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.streams import Std, parse_std, std_of
from resilio_hpc.launch.protocol.message_parts import Cause
from resilio_hpc.launch.workers.echoes import EchoFolder, RoundEnd
from resilio_hpc.launch.workers.error_file import read_error

MAX_LINE_BYTES = 32 * 1024  # a longer line is written in pieces of this size, so that memory stays bounded
_READ_BYTES = 64 * 1024
_PENDING_BYTES = 256 * 1024  # read, and not yet taken by the console
LAST_BYTES = 16 * 1024  # the end of a stream that is shown no further
PROGRESS_EVERY_S = 5.0
_UNPRINTABLE = re.compile("(\x1b\\[[0-9;]*m)|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# poll(2) reports a pipe as writable when PIPE_BUF bytes fit; more could block
_SAFE_WRITE = select.PIPE_BUF


@dataclass(frozen=True)
class RankLogs:
    """One rank of one round, the files of its streams, and that of its error."""

    rank: int
    local_rank: int
    stdout: Path
    stderr: Path
    error: Path | None = None  # its error file; None: nothing of it is held back


@dataclass(frozen=True)
class Shown:
    """Where one stream of one rank is shown, besides its log file."""

    on_console: bool
    words: tuple[bytes, ...]  # a line that holds one of these words is duplicated
    prefix: bytes


def shown(options: LaunchOptions, local_rank: int, rank: int, world_size: int, stream: Std) -> Shown:
    """Return where a stream is shown. Pure.

    These are torchrun's rules: a teed stream is shown, a redirected one is not, the filter holds for both. Without
    ``--tee`` everything that is not redirected is shown, and lines that hold a filter's word are duplicated. Beside a
    live view, nothing is shown.
    """
    teed = bool(std_of(options.tee, local_rank) & stream)
    redirected = bool(std_of(options.redirects, local_rank) & stream)
    wanted = not options.local_ranks_filter or local_rank in options.local_ranks_filter
    words = options.duplicate_stdout_filters if stream == Std.OUT else options.duplicate_stderr_filters
    duplicated = wanted and (teed or parse_std(options.tee) == Std.NONE)
    return Shown(
        on_console=wanted and not options.view and (teed or not redirected),
        words=tuple(word.encode() for word in words) if duplicated else (),
        prefix=_prefix(options, local_rank, rank, world_size, teed).encode(errors="replace"),
    )


def folds_echoes(options: LaunchOptions) -> bool:
    """Return whether tracebacks of echoes are kept off the console: not where the user has chosen what is shown. Pure.

    Torchrun's ``--tee`` and ``--local-ranks-filter`` name streams that are shown whole.
    """
    return options.echoes == "fold" and parse_std(options.tee) == Std.NONE and not options.local_ranks_filter


def _prefix(options: LaunchOptions, local_rank: int, rank: int, world_size: int, teed: bool) -> str:
    if options.log_line_prefix_template:
        return Template(options.log_line_prefix_template).safe_substitute(
            role_name=options.role, rank=rank, local_rank=local_rank
        )
    if teed:
        return f"[{options.role}{local_rank}]:"
    return f"[rank {rank}] " if world_size > 1 else ""


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


class _Sink:
    """A file descriptor that may block; only as many bytes are written as it takes at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = bytearray()
        self._broken = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        return len(self._pending) >= _PENDING_BYTES

    @property
    def empty(self) -> bool:
        return not self._pending

    def put(self, data: bytes) -> None:
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


class _Tail:
    """One stream of one rank."""

    def __init__(
        self, path: Path, how: Shown, console: _Sink, duplicate: BinaryIO | None, folder: EchoFolder | None
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
            return os.read(self._fd, _READ_BYTES)
        except OSError:  # the file does not exist yet
            return b""

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


@dataclass
class _Round:
    """The streams of one round. Once it is ``ending``, a stream that was read to its end is dropped."""

    tails: list[_Tail]
    duplicates: list[BinaryIO]
    end: RoundEnd
    ending: bool = False

    def read(self, now: float) -> bool:
        more = [tail.read(now) for tail in self.tails]
        if self.ending:
            for tail in [tail for tail, again in zip(self.tails, more, strict=True) if not again]:
                tail.close()
                self.tails.remove(tail)
        return any(more)

    def leave_out(self, logs: Path) -> None:
        for tail in self.tails:
            tail.leave_out(logs)

    def close(self) -> None:
        for tail in self.tails:
            tail.close()
        for file in self.duplicates:
            file.close()


class Console:
    """Shows the output of this node's ranks. An agent has one, and calls ``watch`` for each round."""

    def __init__(
        self,
        options: LaunchOptions,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._sinks = {Std.OUT: _Sink(stdout_fd), Std.ERR: _Sink(stderr_fd)}
        self._rounds: list[_Round] = []

    def watch(self, ranks: Sequence[RankLogs], world_size: int, directory: Path) -> None:
        """Follow a new round's files (they need not exist yet); files of earlier rounds are read to their ends.

        Duplicated lines go to ``filtered_stdout.log`` and ``filtered_stderr.log`` in ``directory``.
        """
        self._end_rounds()
        duplicates: dict[Std, BinaryIO] = {}
        if self._options.duplicate_stdout_filters:
            duplicates[Std.OUT] = open(directory / "filtered_stdout.log", "ab", buffering=0)  # noqa: SIM115
        if self._options.duplicate_stderr_filters:
            duplicates[Std.ERR] = open(directory / "filtered_stderr.log", "ab", buffering=0)  # noqa: SIM115
        tails, end = [], RoundEnd()
        for logs in ranks:
            merged = logs.stdout == logs.stderr  # one file for both: it is shown once, as standard output
            streams = ((Std.OUT, logs.stdout),) if merged else ((Std.OUT, logs.stdout), (Std.ERR, logs.stderr))
            for stream, path in streams:
                how = shown(self._options, logs.local_rank, logs.rank, world_size, stream)
                if how.on_console or how.words:
                    folder = self._folder(logs, end) if path == logs.stderr else None
                    tails.append(_Tail(path, how, self._sinks[stream], duplicates.get(stream), folder))
        self._rounds.append(_Round(tails, list(duplicates.values()), end))

    def _folder(self, logs: RankLogs, end: RoundEnd) -> EchoFolder | None:
        error = logs.error
        if error is None or not folds_echoes(self._options):
            return None
        return EchoFolder(logs.rank, lambda: read_error(error)[0], end)

    def judge(self, cause: Cause | None) -> None:
        """Take what ended the rounds so far, as the controller says; None: it knows of no cause."""
        for one in self._rounds:
            one.end.judge(cause)

    def follow(self, for_s: float) -> None:
        """Print what is new, for ``for_s`` at most, without blocking."""
        until = self._clock() + for_s
        while self.poll() and self._clock() < until:
            continue

    def poll(self) -> bool:
        """Print what is new, without blocking. Return True if there may be more."""
        self._flush(0.0)
        now = self._clock()
        more = [one.read(now) for one in self._rounds]
        for one in [one for one in self._rounds if one.ending and not one.tails]:
            one.close()
            self._rounds.remove(one)
        self._flush(0.0)
        return any(more)

    def close(self, wait_s: float = 5.0) -> None:
        """Print the rest, as far as the console takes it within ``wait_s``; of too much output, the last lines."""
        self._end_rounds()
        deadline = self._clock() + wait_s
        while (self._rounds or not all(sink.empty for sink in self._sinks.values())) and self._clock() < deadline:
            self.poll()
            self._flush(0.05)
        if self._rounds:
            for one in self._rounds:
                one.leave_out(self._options.logs_directory)
            deadline = self._clock() + wait_s
        while not all(sink.empty for sink in self._sinks.values()) and self._clock() < deadline:
            self._flush(0.05)
        for one in self._rounds:
            one.close()
        self._rounds.clear()
        self._flush(0.0)

    def _end_rounds(self) -> None:
        for one in self._rounds:
            one.ending = True

    def _flush(self, wait_s: float) -> None:
        for sink in self._sinks.values():
            sink.flush(wait_s)
