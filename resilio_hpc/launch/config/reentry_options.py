"""Which ranks a restart ends: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from resilio_hpc.launch.config.flags import failures_flag, whole_number

RestartPolicy = Literal["in-process", "failed", "all"]
ProcessImagesChoice = Literal["off", "on"]


@dataclass(frozen=True)
class ReentryOptions:
    """``restart_policy``: the rules are in ``launch/agent/kept_ranks`` and ``launch/controller/faults/rank_restarts``.

    ``spare_ranks``: of each node, see ``launch/workers/standby_ranks``; ``process_images``: ``…/process_images``.
    """

    restart_policy: RestartPolicy = failures_flag(
        "what a failure restarts; in-process: ranks that live and are inside of a function marked @train.restartable "
        "enter it again in the same process, and only the others are started again; failed: a rank that "
        "fails is started again alone, and the others are not touched: for ranks that do not need one another; all: "
        "every rank is ended and started again (default: in-process)",
        "in-process",
        choices=get_args(RestartPolicy),
    )
    spare_ranks: int = failures_flag(
        "keep K more processes ready on each node: they run the script up to its @train.restartable function, and one "
        "takes the place of a rank that is lost (default: 0)",
        0,
        whole_number,
        metavar="K",
        least=0,
    )
    process_images: ProcessImagesChoice = failures_flag(
        "on: the processes of --spare-ranks wait as images on each node's disk, and not in memory; CRIU dumps them, "
        "and restores one in the place of a rank that is lost (default: off)",
        "off",
        choices=get_args(ProcessImagesChoice),
    )
