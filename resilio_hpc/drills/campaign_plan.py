"""What a campaign is to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.devtools.devcluster.spec import HOST_SERIES


@dataclass(frozen=True)
class CampaignPlan:
    """What a campaign does. Times in seconds.

    ``weights``: of faults, by name (``campaign_faults.FAULTS``; None: all of them). ``nodes``: of the run, which goes
    on with as few as ``min_nodes``. ``twin``: the same run on other nodes, without faults. ``every``: steps between two
    saves. ``torch`` False: ranks sum over plain sockets.
    """

    mtbf_s: float = 60.0
    duration_s: float = 600.0
    seed: int = 0
    weights: Mapping[str, float] | None = None
    nodes: int = 4
    min_nodes: int = 2
    ranks: int = 2
    twin: bool = True
    step_s: float = 0.1
    every: int = 20
    elements: int = 1000
    torch: bool = True
    fuse: bool = False
    launch_arguments: tuple[str, ...] = ()
    slurm: str = HOST_SERIES
