"""What follows from results that are wrong though nothing failed: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from resilio_hpc.launch.config.flags import failures_flag

OnCorruption = Literal["report", "stop", "restore"]


@dataclass(frozen=True)
class CorrectnessOptions:
    """``on_corruption``: the rules are in ``launch/controller/checkpoints/replica_check``."""

    on_corruption: OnCorruption = failures_flag(
        "replicas whose parameters or optimizer states are not the same any more; report: in the ledger; stop: the run "
        "ends; restore: all ranks go back to the newest checkpoint before which replicas were equal, and a spare takes "
        "the place of the node of the rank that differs (default: report)",
        "report",
        choices=get_args(OnCorruption),
    )
