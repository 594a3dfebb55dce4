"""The agent's end of the saver process, which writes snapshots from shared memory to the shared directory.

It answers in the order of the requests, so each answer belongs to the oldest request without one.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.saver import messages
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.launch.process.child_link import MAX_UNSENT, ChildLink

PAUSE_LIMIT_S = 10.0
DIED = "the saver process was killed"


class SaverRequest(NamedTuple):
    """A request to the saver: to commit a step, or to persist it."""

    commits: bool
    round: int
    step: int


class SaverLink(ChildLink):
    """Starts the saver on first use. The next request starts one that died again."""

    def __init__(self, log: Path, max_unsent: int = MAX_UNSENT) -> None:
        super().__init__("ckpt.saver.saver", log, max_unsent)
        self._asked: deque[SaverRequest] = deque()  # requests without an answer
        self._paused_at: float | None = None

    def send(self, message: messages.Persist | messages.Commit) -> bool:
        """Send a request; return False when the saver cannot take it. The answer comes from ``receive``."""
        if self._process is None:
            self.start()
            if self._paused_at is not None:
                self._stop()
        if not self.takes:
            return False  # ``receive`` tells of its death, and fails its requests
        commits = isinstance(message, messages.Commit)
        self._asked.append(SaverRequest(commits, message.round, message.step))
        if commits:
            self.resume()
        self.write(encode_line(message))
        return True

    def abandon(self) -> None:
        """Abandon the persist requests: their snapshots have no use any more.

        The saver must not wait for another node's part, and hold the snapshots meanwhile.
        """
        if self.takes and any(not request.commits for request in self._asked):
            self.write(encode_line(messages.Abandon()))

    def pause(self) -> None:
        """Pause the saver, so ranks that restart get processors and memory bandwidth, for PAUSE_LIMIT_S at most.

        It is not paused during a commit: the restart may have to wait for that.
        """
        if self._paused_at is not None or any(request.commits for request in self._asked):
            return
        self._paused_at = time.monotonic()
        self._stop()

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)

    @property
    def paused_pids(self) -> tuple[int, ...]:
        """Return the saver's pid, while it is paused."""
        return () if self._paused_at is None or self._process is None else (self._process.pid,)

    def resume(self) -> None:
        """Let the saver go on, and write what the pipe did not take before."""
        if self._paused_at is not None and self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
        self._paused_at = None

    def tick(self) -> None:
        """End a pause that has lasted too long: durability matters more than the last bit of speed."""
        if self._paused_at is not None and time.monotonic() - self._paused_at > PAUSE_LIMIT_S:
            self.resume()

    def receive(self) -> list[tuple[SaverRequest, messages.Progress | messages.Answer]]:
        """Return the answers that have arrived, and the progress of the oldest request without one.

        When the saver died, all its requests have failed, and ``fileno`` is None.
        """
        lines = self.read()
        if lines is None:
            asked = list(self._asked)
            self._asked.clear()
            return [(request, messages.SaverFailed(request.step, DIED)) for request in asked]
        said = [messages.decode_answer(line) for line in lines]
        return [
            (self._asked[0] if isinstance(word, messages.Progress) else self._asked.popleft(), word) for word in said
        ]

    def close(self) -> None:
        """See ChildLink."""
        self.resume()
        super().close()

    def end(self) -> None:
        """See ChildLink."""
        super().end()
        self._paused_at = None
