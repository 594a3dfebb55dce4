"""The agent's end of the saver process, which writes snapshots from shared memory to the shared directory.

The saver reads no requests while it writes, is paused, or its file system hangs: what does not fit into the pipe waits
here, never the agent, whose heartbeats must go on. (The request to commit a step of hundreds of nodes does not fit.)
It answers in the order in which it was asked, so each answer is to the first request that has none.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt import saver_messages
from resilio_hpc.launch import bootstrap

PAUSE_LIMIT_S = 10.0
CLOSE_S = 2.0
DIED = "the saver process was killed"
MAX_UNSENT = 64 << 20  # bytes: a dozen commits of thousands of nodes


class Request(NamedTuple):
    """What was asked: to commit a step, or else to persist it."""

    commits: bool
    round: int
    step: int


class SaverLink:
    """Starts the saver on first use; a saver that dies is started again by the next request."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._unsent = bytearray()
        self._asked: deque[Request] = deque()  # without an answer yet
        self._paused_at: float | None = None

    @property
    def full_fileno(self) -> int | None:
        """For poll, while something waits that does not fit into the pipe."""
        process = self._process
        return process.stdin.fileno() if self._unsent and process is not None and process.stdin else None

    def fileno(self) -> int | None:
        """For poll; None while no saver runs."""
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout else None

    def start(self) -> None:
        """Start the process, so that its imports are done when the first snapshot comes."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bootstrap.command("ckpt.saver"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout and self._process.stdin
        os.set_blocking(self._process.stdout.fileno(), False)
        os.set_blocking(self._process.stdin.fileno(), False)
        self._buffer = b""

    def send(self, message: saver_messages.Persist | saver_messages.Commit) -> bool:
        """Send a request, in time; False when the saver cannot take it. The answer comes from ``receive``."""
        if self._process is None:
            self.start()
        assert self._process is not None
        if self._process.poll() is not None or len(self._unsent) > MAX_UNSENT:
            return False  # of its death ``receive`` tells, with what was in its hands
        commits = isinstance(message, saver_messages.Commit)
        self._asked.append(Request(commits, message.round, message.step))
        if commits:
            self.resume()
        self._unsent += saver_messages.encode_line(message)
        self.push()
        return True

    def push(self) -> None:
        """Write what fits into the pipe; call it again when ``full_fileno`` can be written to."""
        assert self._process is not None and self._process.stdin
        try:
            while self._unsent:
                del self._unsent[: os.write(self._process.stdin.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # it is dead: ``receive`` tells

    def pause(self) -> None:
        """Leave processors and memory bandwidth to ranks that are being restarted, for PAUSE_LIMIT_S at most.

        Not while it is to commit a step: the restart may have to wait for that.
        """
        if self._paused_at is not None or any(request.commits for request in self._asked):
            return
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Write on."""
        if self._paused_at is not None and self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
        self._paused_at = None

    def tick(self) -> None:
        """End a pause that has lasted too long: durability matters more than the last bit of speed."""
        if self._paused_at is not None and time.monotonic() - self._paused_at > PAUSE_LIMIT_S:
            self.resume()

    def receive(self) -> list[tuple[Request, saver_messages.Answer]]:
        """Answers that have arrived. When the saver died, all that it was asked has failed, and ``fileno`` is None."""
        assert self._process is not None
        descriptor = self.fileno()
        assert descriptor is not None
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            asked = list(self._asked)
            self._end()
            return [(request, saver_messages.SaverFailed(request.step, DIED)) for request in asked]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [(self._asked.popleft(), saver_messages.decode_answer(line)) for line in lines if line]

    def close(self) -> None:
        """End it: it gets what waits for it, then standard input closes, and it is killed if it lingers."""
        if self._process is None:
            return
        self.resume()
        assert self._process.stdin
        deadline = time.monotonic() + CLOSE_S
        while self._unsent and time.monotonic() < deadline:
            select.select([], [self._process.stdin], [], 0.1)
            self.push()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(max(0.1, deadline - time.monotonic()))
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        self._process = self._paused_at = None
        self._unsent.clear()
        self._asked.clear()
