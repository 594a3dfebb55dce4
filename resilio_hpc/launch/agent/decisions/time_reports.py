"""What an agent tells its controller of how its ranks spend their time. Pure."""

from __future__ import annotations

import msgspec

from resilio_hpc.diagnose.slow.rank_facts import NodeFacts, RankWindow
from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.protocol import messages as m


class TimeReports:
    """Sends each window once: what is lost with a connection is not worth repeating."""

    def __init__(self, reports: ControllerReports) -> None:
        self._reports = reports
        self._trip_s: float | None = None
        self._gpus_throttled = self._throttle_reasons = 0

    def answered(self, trip_s: float) -> None:
        """Take how long the controller's answer to a heartbeat took."""
        self._trip_s = trip_s if self._trip_s is None else min(self._trip_s, trip_s)

    def gpus(self, throttled: int, throttle_reasons: int) -> None:
        """Take how many GPUs are held down, and why, as the newest sample says."""
        self._gpus_throttled, self._throttle_reasons = throttled, throttle_reasons

    def passed(self, round_number: int, window: int, ranks: tuple[RankWindow, ...], facts: NodeFacts) -> None:
        """Send a window that has ended."""
        trip_s, self._trip_s = self._trip_s, None
        facts = msgspec.structs.replace(
            facts,
            trip=max(0, round((trip_s or 0.0) * 1e6)),
            gpus_throttled=self._gpus_throttled,
            throttle_reasons=self._throttle_reasons,
        )
        self._reports.tell(m.RankTimes(self._reports.node, self._reports.epoch, round_number, window, ranks, facts))
