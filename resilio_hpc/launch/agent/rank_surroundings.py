"""What surrounds the ranks of a node: its devices, and what their communication libraries write."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.launch.agent.collective_traces import CollectiveTraces
from resilio_hpc.launch.agent.device_eviction import DeviceEviction


class RankSurroundings:
    """The real ``rank_owner.Surroundings``."""

    def __init__(self, devices: DeviceEviction, traces: CollectiveTraces) -> None:
        self._devices = devices
        self._traces = traces

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for all ranks of the node."""
        return self._devices.variables | self._traces.variables

    def rank_failed(self, local_rank: int, said: tuple[str, str], log: Path | None) -> None:
        """Take note that a rank ended by itself."""
        self._devices.rank_failed(local_rank, said, log)
