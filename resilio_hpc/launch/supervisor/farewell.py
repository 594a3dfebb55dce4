"""How long the launcher waits for its agents after the verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.launch.allocation import placements as p
from resilio_hpc.launch.allocation.placements import SiteMode

FAREWELL_S = 20.0  # time for agents to end after the verdict
LOST_S = 5.0  # when other agents have left and one has not: an srun to a lost node does not end by itself


@dataclass(frozen=True)
class Farewell:
    """The time after the verdict. ``since``: when it came; ``kept``: placements that had not been given up then."""

    since: float
    kept: int

    def over(self, now: float, running: int, site: p.Site) -> bool:
        """Return whether to stop waiting for the agents that still run."""
        waited = now - self.since
        return waited > FAREWELL_S or (waited > LOST_S and site.mode is SiteMode.BATCH and running < self.kept)
