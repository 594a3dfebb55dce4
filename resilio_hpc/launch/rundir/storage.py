"""The agent's side of its child for the shared file system (``io_worker``): requests and answers, none of which blocks.

A child that hangs or dies is replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilio_hpc.core import process_title
from resilio_hpc.launch.process import bootstrap

MAX_QUEUED = 64  # requests that wait for a child that hangs
# may be large, and is repeated; an old one is dropped, so that a verdict need not wait for it
ONLY_NEWEST = ("status", "keep_limits")
Answer = Callable[[dict[str, Any] | None], None]  # None: the file system failed or the child was killed


class Storage:
    """Sends requests to the child; answers come by callback. No call blocks."""

    def __init__(self, run_path: Path, spool: Path, job: str, run_id: str = "", owner: str = "") -> None:
        """Take paths and job; ``run_id``: the run that ``run_path`` must hold, "": any; ``owner``: for its title."""
        self._environment = {**os.environ, process_title.OWNER_VARIABLE: owner} if owner else None
        self._argv = [
            *bootstrap.command("launch.rundir.io_worker"),
            str(run_path),
            str(spool),
            job,
            str(os.getpid()),
            run_id,
        ]
        self.gone = False
        """The run directory was removed, or is another run's: it will not come back."""
        self._pending: dict[int, Answer] = {}
        self._next = 0
        self._buffer = b""
        self._queue: deque[tuple[int, str, bytes]] = deque()  # (number, operation, line) of requests not sent yet
        self._unsent = memoryview(b"")  # the rest of a request that did not fit into the pipe
        self._turn = 0  # the turn whose pulse the child writes
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self._environment
        )  # fmt: skip
        assert process.stdin and process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def request(self, operation: str, answer: Answer | None = None, **arguments: Any) -> None:
        """Send a request; ``answer`` is called from ``serve``, or at once where too much waits for a hung child."""
        self._next += 1
        if operation in ONLY_NEWEST:
            self._drop_unsent(operation)
        if len(self._queue) >= MAX_QUEUED:
            if answer is not None:
                answer(None)
            return
        if answer is not None:
            self._pending[self._next] = answer
        line = json.dumps({"id": self._next, "op": operation, **arguments}).encode() + b"\n"
        self._queue.append((self._next, operation, line))
        self.push()

    def show_life(self, turn: int) -> None:
        """Let the child, and each one after it, write the pulse of a turn (``holder``)."""
        self._turn = turn
        self.request("show_life", turn=turn)

    def _drop_unsent(self, operation: str) -> None:
        """Drop requests of this kind that are not sent yet, since a newer one replaces them."""
        dropped = [number for number, queued, _ in self._queue if queued == operation]
        self._queue = deque(entry for entry in self._queue if entry[1] != operation)
        for number in dropped:
            answer = self._pending.pop(number, None)
            if answer is not None:
                answer(None)

    def push(self) -> None:
        """Write what fits into the pipe; call it again when ``full_fileno`` is writable."""
        assert self._process.stdin
        while self._unsent or self._queue:
            if not self._unsent:
                self._unsent = memoryview(self._queue.popleft()[2])
            try:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]
            except (BlockingIOError, BrokenPipeError):
                return

    @property
    def full_fileno(self) -> int | None:
        """Return the descriptor to poll for writing, while bytes wait that did not fit into the pipe."""
        assert self._process.stdin
        return self._process.stdin.fileno() if self._unsent or self._queue else None

    def serve(self) -> None:
        """Take the answers that have arrived, send what waits; restart a child that died."""
        self.push()
        try:
            data = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._restart()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            self.gone = reply.get("gone", False)
            answer = self._pending.pop(reply["id"], None)
            if answer is not None:
                answer(None if "error" in reply else reply)

    def _restart(self) -> None:
        self._process.kill()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel, and ends when the file system is back
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        pending, self._pending, self._buffer, self._unsent = self._pending, {}, b"", memoryview(b"")
        self._queue.clear()
        self._process = self._start()
        if self._turn:
            self.request("show_life", turn=self._turn)
        for answer in pending.values():
            answer(None)

    def close(self, timeout_s: float) -> bool:
        """Let the child drain the rest and end; kill it if it does not. Return False if something was left behind."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            return False
        finally:
            self._process.stdout.close()
