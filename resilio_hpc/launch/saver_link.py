"""The agent's end of the saver process, which writes snapshots from shared memory to the shared directory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from resilio_hpc.ckpt import saver_messages
from resilio_hpc.launch import bootstrap

PAUSE_LIMIT_S = 10.0


class SaverLink:
    """Starts the saver on first use; a saver that dies is started again by the next request."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._paused_at: float | None = None

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
        self._buffer = b""

    def send(self, message: saver_messages.Persist | saver_messages.Commit) -> bool:
        """Send a request; False when the saver cannot take it."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None and self._process.stdin
        try:
            self._process.stdin.write(saver_messages.encode_line(message))
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def pause(self) -> None:
        """Leave processors and memory bandwidth to ranks that are being restarted, for PAUSE_LIMIT_S at most."""
        if self._process is not None and self._paused_at is None and self._process.poll() is None:
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

    def receive(self) -> list[saver_messages.Answer] | None:
        """Answers that have arrived; None when the saver died."""
        assert self._process is not None
        descriptor = self.fileno()
        assert descriptor is not None
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            self._process.kill()
            self._process.wait()
            self._process = None
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [saver_messages.decode_answer(line) for line in lines if line]

    def close(self) -> None:
        """End it: standard input closes, then it is killed if it lingers."""
        if self._process is None:
            return
        self.resume()
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(2.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
