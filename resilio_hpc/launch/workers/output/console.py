"""The ranks' output on the agent's console: reads their log files and prints whole lines, each with its rank.

``poll()`` never blocks: files are read in bounded pieces, and no more is read while the console (a pipe to srun,
perhaps stuck) has not taken the last piece. The log files hold everything in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.streams import Std
from resilio_hpc.launch.protocol.message_parts import Cause
from resilio_hpc.launch.workers.output.echoes import EchoFolder, RoundEnd
from resilio_hpc.launch.workers.output.error_file import read_error
from resilio_hpc.launch.workers.output.log_tail import ConsoleSink, LogTail
from resilio_hpc.launch.workers.output.shown_streams import folds_echoes, shown


class RankLogs(Struct, frozen=True):
    """One rank of one round, the files of its streams, and that of its error."""

    rank: int
    local_rank: int
    stdout: Path
    stderr: Path
    error: Path | None = None  # its error file; None: nothing of it is held back


class _Round(Struct):
    """The streams of one round. Once it is ``ending``, a stream that was read to its end is dropped."""

    tails: list[LogTail]
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
        self._sinks = {Std.OUT: ConsoleSink(stdout_fd), Std.ERR: ConsoleSink(stderr_fd)}
        self._rounds: list[_Round] = []

    def watch(self, ranks: Sequence[RankLogs], world_size: int, directory: Path) -> None:
        """Follow a new round's files (they need not exist yet); files of earlier rounds are read to their ends.

        Duplicated lines go to ``filtered_stdout.log`` and ``filtered_stderr.log`` in ``directory``.
        """
        self._end_rounds()
        duplicates: dict[Std, BinaryIO] = {}
        if self._options.output.duplicate_stdout_filters:
            duplicates[Std.OUT] = open(directory / "filtered_stdout.log", "ab", buffering=0)  # noqa: SIM115
        if self._options.output.duplicate_stderr_filters:
            duplicates[Std.ERR] = open(directory / "filtered_stderr.log", "ab", buffering=0)  # noqa: SIM115
        tails, end = [], RoundEnd()
        for logs in ranks:
            merged = logs.stdout == logs.stderr  # one file for both: it is shown once, as standard output
            streams = ((Std.OUT, logs.stdout),) if merged else ((Std.OUT, logs.stdout), (Std.ERR, logs.stderr))
            for stream, path in streams:
                how = shown(self._options, logs.local_rank, logs.rank, world_size, stream)
                if how.on_console or how.words:
                    folder = self._folder(logs, end) if path == logs.stderr else None
                    tails.append(LogTail(path, how, self._sinks[stream], duplicates.get(stream), folder))
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
