"""When the job ends to which an agent belongs. Joiners need it: their job is not the run's."""

from __future__ import annotations

import math
import time
from typing import Any

from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.rundir.storage import Storage

LOOK_S = 60.0  # seconds between two looks at the job's end, which may be changed
LEAVES_BEFORE_S = 60.0  # seconds before its job ends at which a joiner says so
TERM_LEAVES_S = 10.0  # Slurm kills 30 s (KillWait) after SIGTERM; a joiner has left by then


class OwnJob:
    """Follows the end of the agent's own job, and lets a joiner leave in time."""

    def __init__(self, settings: AgentSettings, storage: Storage, clock_ahead_s: float = 0.0) -> None:
        """Take settings and storage; ``clock_ahead_s``: how far slurmctld's clock is ahead of this node's."""
        self._ahead_s = clock_ahead_s
        self._settings = settings
        self._storage = storage
        self._end_time = settings.end_time
        self._next_look = 0.0

    def lasts_s(self, signal_name: str) -> float | None:
        """Return how many seconds the job lasts after a warning, where known."""
        if signal_name != "USR2":
            return TERM_LEAVES_S
        return self._left_s() if self._end_time is not None and math.isfinite(self._end_time) else None

    def _left_s(self) -> float:
        return math.inf if self._end_time is None else self._end_time + self._ahead_s - time.time()

    def tick(self, core: AgentCore) -> None:
        """Let a joiner leave before its own job's time limit."""
        now = time.monotonic()
        if not self._settings.join:
            return
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._storage.request("end_time", self._learn, job=self._settings.own_job)
        if self._left_s() < LEAVES_BEFORE_S and not core.warnings.signals:
            core.warned("USR2", self._left_s())

    def _learn(self, reply: dict[str, Any] | None) -> None:
        if reply is not None and reply["end_time"] is not None:
            self._end_time = reply["end_time"]
