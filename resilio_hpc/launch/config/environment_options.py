"""What is looked at on each node before ranks start: part of a run's options."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.launch.config.flags import failures_flag


@dataclass(frozen=True)
class EnvironmentOptions:
    """See ``launch/agent/environment_check``."""

    data_paths: tuple[str, ...] = failures_flag(
        "a file or directory that ranks read: a node that lacks it, or may not read it, takes no part, and a spare "
        "takes its place; may be given several times",
        (),
        reads=tuple,
        metavar="PATH",
        repeatable=True,
        names="--data-path",
    )
    check_environment: bool = failures_flag(
        "do not compare versions, limits and free space of the nodes, nor look for the script",
        True,
        None,
        raw=False,
        reads=lambda given: not given,
        names="--no-environment-check",
    )
