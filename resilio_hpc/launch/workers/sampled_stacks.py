"""Python and native stacks of single ranks, sampled from outside by py-spy where it is installed, for people to read.

A rank writes its own Python stacks when it is asked (``rank_look``). This shows the calls of C and C++ below them, and
ranks that cannot answer. One rank at a time; no result is waited for.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

WITHIN_S = 30.0  # py-spy takes a tenth of a second, seconds where it reads the symbols of large libraries
WAYS = (("--native",), ("--nonblocking",))  # the first one suspends the rank for a moment, which a stopped one refuses


def sampler() -> str:
    """Return py-spy's program, of this environment or on the path; "" without one."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""


class SampledStacks:
    """Samples ranks that are asked for, one after the other, each into a file of its own."""

    def __init__(self, program: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Take py-spy's program, "" for none; None: find it."""
        self._program = sampler() if program is None else program
        self._clock = clock
        self._waiting: list[tuple[int, Path, tuple[str, ...]]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._current: tuple[int, Path, tuple[str, ...]] | None = None
        self._deadline = 0.0

    def ask(self, ranks: Mapping[int, Path]) -> None:
        """Sample these processes, each into its file. Those of an earlier order that have not begun are left out."""
        self._waiting = [(pid, path, WAYS[0]) for pid, path in ranks.items()] if self._program else []

    def suspends(self, pid: int | None) -> bool:
        """Return whether this process is being sampled, which stops it for a moment, seconds on a busy node."""
        return self._process is not None and self._current is not None and self._current[0] == pid

    def tick(self) -> None:
        """Begin what waits; end what takes too long."""
        if self._process is not None and self._current is not None:
            code = self._process.poll()
            if code is None and self._clock() < self._deadline:
                return
            pid, path, way = self._current
            if code is None:
                self._end()
            elif code != 0 and way != WAYS[-1]:
                self._waiting.insert(0, (pid, path, WAYS[-1]))
            self._process = self._current = None
        if self._waiting:
            self._begin(self._waiting.pop(0))

    def _begin(self, wanted: tuple[int, Path, tuple[str, ...]]) -> None:
        pid, path, way = wanted
        argv = [self._program, "dump", *way, "--pid", str(pid)]
        try:
            with path.open("ab") as file:
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
        except OSError:
            return  # no room, or no such program any more: the rank's own stacks are there
        self._current, self._deadline = wanted, self._clock() + WITHIN_S

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)  # else it hangs in the kernel

    def close(self) -> None:
        """End a sample that is under way."""
        self._waiting = []
        self._end()
        self._process = self._current = None
