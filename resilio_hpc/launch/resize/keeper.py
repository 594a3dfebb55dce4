"""Keeps ``resilio resize --watch`` running beside a launch (``--resize``), and never delays the launch.

Only this thread starts it and waits for it: either may hang with a file system. The process holds no state that matters
(see ``resizer``), so it is killed at the end, and the kernel kills it when the launcher dies.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.submit import submission

FIRST_PAUSE_S = 5.0  # seconds before it is started again; doubled each time
LONGEST_PAUSE_S = 600.0
STEADY_S = 300.0  # after so many seconds, the pause starts over


def command(options: LaunchOptions, run_path: Path) -> tuple[str, ...]:
    """Return the command that runs beside the launch: the same loop as by hand; it only watches if the launch does."""
    words = [*bootstrap.command("cli.main"), "resize", str(run_path), "--gpus", f"--launcher={os.getpid()}"]
    words += [f"--policy={options.resizing.resize_policy}"] if options.resizing.resize_policy else []
    words += [] if options.mode == Mode.RECOVER else ["--observe"]
    return (*words, *options.resizing.resize_options)


class ResizeKeeper:
    """Runs one resizer at a time, until it says that the run is over, or ``close``."""

    def __init__(self, argv: Sequence[str], first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._argv = argv
        self._first_pause_s = first_pause_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # orders a start and ``close``
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="resizer", daemon=True)

    def start(self) -> None:
        """Start the resizer."""
        self._thread.start()

    def close(self) -> None:
        """End it, without waiting for its end."""
        self._closed.set()
        if self._lock.acquire(timeout=0.1):  # a start under way finds that it is closed
            try:
                self._kill()
            finally:
                self._lock.release()

    def _keep(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            began = time.monotonic()
            code = self._run_once()
            if code == 0 or self._closed.is_set():
                return
            if time.monotonic() - began > STEADY_S:
                pause_s = self._first_pause_s
            say(f"--resize: the resizer ended (exit code {code}), and is started again in {pause_s:.0f} s")
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run_once(self) -> int:
        """Run it once. Return its exit code; as in a shell, 127 where it could not be started."""
        environment = submission.own_environment(os.environ)  # as on a login node: it is no part of this job step
        with self._lock:
            try:
                process = subprocess.Popen(
                    self._argv, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            except OSError as error:
                say(f"--resize: {error}")
                return 127
            self._process = process
            if self._closed.is_set():
                self._kill()
        return process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
