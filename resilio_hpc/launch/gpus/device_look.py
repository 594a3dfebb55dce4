"""One look at the node's GPUs: ``device_evidence`` in a process that is killed when its time is up."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.launch.gpus.eviction import DeviceEvidence, Identity
from resilio_hpc.launch.process import bootstrap

MOST_BYTES = 1 << 20


class Said(msgspec.Struct, frozen=True):
    """The result of one stage. ``note``: why it has none."""

    stage: str
    evidence: tuple[DeviceEvidence, ...] = ()
    identities: tuple[Identity, ...] = ()
    note: str = ""


class DeviceLook:
    """A look under way. ``said``: results so far. A process that cannot be killed (its driver hangs) is left behind."""

    def __init__(
        self,
        since_s: float,
        log: Path,
        within_s: float,
        argv: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to look.

        ``since_s``: errors count from this uptime of the node on. ``argv``: another program that looks.
        """
        self.said: list[Said] = []
        self.timed_out = False
        self._within_s = within_s
        self._clock = clock
        self._deadline = clock() + within_s
        self._buffer = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*(argv or bootstrap.command("launch.gpus.device_evidence")), str(since_s)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def over(self) -> bool:
        """Take the results. Return whether they are complete, or the time is up."""
        try:
            while data := os.read(self.fileno(), 65536):
                self._take(data)
        except BlockingIOError:
            if self._clock() < self._deadline and len(self._buffer) < MOST_BYTES:
                return False
            self.timed_out = True
        self.end()
        return True

    def _take(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                self.said.append(msgspec.json.decode(line, type=Said))
            except msgspec.MsgspecError:
                continue  # half a line of a process that was killed

    def notes(self) -> list[str]:
        """Return what could not be looked at, and why."""
        texts = [f"{said.stage}: {said.note}" for said in self.said if said.note]
        if self.timed_out:
            last = self.said[-1].stage if self.said else "nothing"
            texts.append(f"no answer within {self._within_s:g} s after {last} was looked at")
        elif not any(said.stage in ("NVML", "checks") for said in self.said):
            texts.append("the look at the devices ended early")
        return texts

    def end(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        assert self._process.stdout
        self._process.stdout.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel; Python reaps it when it is dead
