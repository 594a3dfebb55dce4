"""The agent's end of a helper process that takes requests and gives answers, as JSON lines.

A helper does not read while it works, is paused, or its file system hangs. What does not fit into the pipe then waits
in this process, so the agent never blocks and its heartbeats go on.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.launch.process import bootstrap

CLOSE_S = 2.0
MAX_UNSENT = 64 << 20  # bytes: a dozen commits of thousands of nodes


class ChildLink:
    """The link to one helper process, which runs a module of this package."""

    def __init__(self, module: str, log: Path, max_unsent: int = MAX_UNSENT, close_s: float = CLOSE_S) -> None:
        """Set the module, its log, and how many bytes may wait before it takes no more.

        ``log``: where its standard error goes; ``close_s``: how long it is waited for at its end.
        """
        self._module = module
        self._log = log
        self._max_unsent = max_unsent
        self._close_s = close_s
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._unsent = bytearray()

    @property
    def full_fileno(self) -> int | None:
        """Return the descriptor to poll for writing, while bytes wait that did not fit into the pipe."""
        process = self._process
        return process.stdin.fileno() if self._unsent and process is not None and process.stdin else None

    def fileno(self) -> int | None:
        """Return the descriptor to poll for answers; None while no process runs."""
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout else None

    def start(self) -> None:
        """Start the helper process."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bootstrap.command(self._module),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                umask=trusted_files.closed_umask(),  # checkpoints in the run directory are believed, too
            )  # fmt: skip
        assert self._process.stdout and self._process.stdin
        os.set_blocking(self._process.stdout.fileno(), False)
        os.set_blocking(self._process.stdin.fileno(), False)
        self._buffer = b""

    @property
    def takes(self) -> bool:
        """Return whether a process runs that has room for another request."""
        return self._process is not None and self._process.poll() is None and len(self._unsent) <= self._max_unsent

    def write(self, line: bytes) -> None:
        """Send a request. Where the process has died, ``read`` tells."""
        self._unsent += line
        self.push()

    def push(self) -> None:
        """Write what fits into the pipe; call it again when ``full_fileno`` is writable."""
        assert self._process is not None and self._process.stdin
        try:
            while self._unsent:
                del self._unsent[: os.write(self._process.stdin.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the process is dead: ``read`` tells

    def read(self) -> list[bytes] | None:
        """Return the lines that have arrived. None: the process died, and ``fileno`` is None."""
        descriptor = self.fileno()
        assert descriptor is not None
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            self.end()
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line for line in lines if line]

    def close(self) -> None:
        """End the process: it gets what waits, then its standard input closes; it is killed if it stays."""
        if self._process is None:
            return
        assert self._process.stdin
        deadline = time.monotonic() + self._close_s
        while self._unsent and time.monotonic() < deadline:
            select.select([], [self._process.stdin], [], 0.1)
            self.push()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(max(0.1, deadline - time.monotonic()))
        self.end()

    def abandon(self) -> subprocess.Popen[bytes] | None:
        """Kill the process without waiting for its end, and return it, for the caller to reap; None without one."""
        process = self._process
        self._kill(0.0)
        return process

    def end(self) -> None:
        """Kill the process, if it runs."""
        self._kill(self._close_s)

    def _kill(self, limit_s: float) -> None:
        if self._process is None:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed while its disk hangs
            self._process.wait(limit_s)
        self._process = None
        self._unsent.clear()
