"""Which ranks a restart ends: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from resilio_hpc.launch.config.flags import failures_flag

RestartPolicy = Literal["in-process", "all"]


@dataclass(frozen=True)
class ReentryOptions:
    """``restart_policy``: the rules are in ``launch/agent/kept_ranks``."""

    restart_policy: RestartPolicy = failures_flag(
        "what a failure restarts; in-process: ranks that live and are inside of a function marked @train.restartable "
        "enter it again in the same process, and only the others are started again; all: every rank is ended and "
        "started again (default: in-process)",
        "in-process",
        choices=get_args(RestartPolicy),
    )
