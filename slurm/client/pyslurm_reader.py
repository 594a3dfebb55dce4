"""The asking side of pyslurm_child: bounded questions to a process that may die or hang at any of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.pyslurm_child import READY

_START_S = 10.0
_LIMIT_BYTES = 1 << 30


class PyslurmLost(SlurmError):
    """Raised when pyslurm is not usable: its process did not start, died, or did not answer in time."""


class PyslurmReader:
    """Starts the child. Raises PyslurmLost when pyslurm cannot be imported, or there is no Slurm."""

    def __init__(self, argv: Sequence[str] = (sys.executable, "-m", "resilio_hpc.slurm.client.pyslurm_child")) -> None:
        try:
            self._child = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise PyslurmLost(f"pyslurm's process cannot be started: {error.strerror}") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout
        os.set_blocking(self._output.fileno(), False)
        if READY not in self._line(_START_S):
            self.close()
            raise PyslurmLost("pyslurm's process says something else")

    def answer(self, question: Sequence[str], timeout_s: float) -> str:
        """Return an answer in scontrol's JSON. Raises PyslurmLost; after that it cannot be asked again."""
        try:
            self._input.write(json.dumps(list(question)).encode() + b"\n")
            self._input.flush()
        except (OSError, ValueError) as error:
            self.close()
            raise PyslurmLost(f"pyslurm's process has ended: {error}") from error
        return self._line(timeout_s)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep, so it is not waited for
            self._child.wait(1.0)

    def __del__(self) -> None:
        if hasattr(self, "_output"):
            self.close()

    def _line(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise PyslurmLost(f"pyslurm: no answer within {timeout_s:g} s")
                part = self._output.read(1 << 20)
                if not part or sum(map(len, parts)) > _LIMIT_BYTES:
                    self.close()
                    raise PyslurmLost("pyslurm's process has ended")
                parts.append(part)
        return b"".join(parts).decode(errors="replace")
