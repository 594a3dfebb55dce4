"""One look at the node's GPUs: ``device_evidence`` in a process that is killed when its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.launch.gpus.eviction import DeviceEvidence, Identity
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.helper_look import HelperLook


class Said(msgspec.Struct, frozen=True):
    """The result of one stage. ``note``: why it has none."""

    stage: str
    evidence: tuple[DeviceEvidence, ...] = ()
    identities: tuple[Identity, ...] = ()
    note: str = ""


class DeviceLook:
    """A look under way. ``said``: results so far."""

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
        command = [*(argv or bootstrap.command("launch.gpus.device_evidence")), str(since_s)]
        self._look = HelperLook(command, log, within_s, self._take, clock)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._look.fileno()

    def over(self) -> bool:
        """Take the results. Return whether they are complete, or the time is up."""
        return self._look.over()

    def _take(self, line: bytes) -> None:
        try:
            self.said.append(msgspec.json.decode(line, type=Said))
        except msgspec.MsgspecError:
            pass  # half a line of a process that was killed

    def notes(self) -> list[str]:
        """Return what could not be looked at, and why."""
        texts = [f"{said.stage}: {said.note}" for said in self.said if said.note]
        if self._look.timed_out:
            last = self.said[-1].stage if self.said else "nothing"
            texts.append(f"no answer within {self._look.within_s:g} s after {last} was looked at")
        elif not any(said.stage in ("NVML", "checks") for said in self.said):
            texts.append("the look at the devices ended early")
        return texts

    def end(self) -> None:
        """Kill the process, if it runs."""
        self._look.end()
