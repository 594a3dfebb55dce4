"""What follows from ranks that are slower than others: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from resilio_hpc.launch.config.flags import failures_flag

SlowRanks = Literal["observe", "act"]


@dataclass(frozen=True)
class SlowOptions:
    """``slow_ranks``: the rules are in ``launch/controller/faults/slow_ranks``."""

    slow_ranks: SlowRanks = failures_flag(
        "ranks that become slower than before, and than the others; observe: they are reported, with the cause where "
        "it is seen; act: ranks pause, the nodes are tested, and spares replace those found slow (default: observe)",
        "observe",
        choices=get_args(SlowRanks),
    )
