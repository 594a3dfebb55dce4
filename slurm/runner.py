"""How a client's commands are run: bounded, and in an environment in which Slurm prints what its manual says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from resilio_hpc.core.process import Completed, run

# A person's defaults for squeue, sinfo and scontrol: formats, filters, sorting, other clusters. (Where slurmctld is,
# SLURM_CONF, stays.) squeue manual, ENVIRONMENT VARIABLES.
_TASTES = re.compile(
    r"(?:SQUEUE|SINFO|SCONTROL|SCANCEL)_.*|SLURM_(?:TIME_FORMAT|CLUSTERS|JSON|YAML|BITSTR_LEN|DEBUG_FLAGS)"
)
READING = {"SLURM_TIME_FORMAT": "%s"}  # times as Unix seconds: no time zone, no summer time


class Runner(Protocol):
    """Runs a command with ``extra`` in its environment; raises CommandError as ``core.process.run`` does."""

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        """The finished command."""


def run_here(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
    """Run a command of Slurm on this machine."""
    return run(argv, timeout_s, env={**without_tastes(os.environ), **extra})


def without_tastes(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what changes the form of Slurm's answers. Pure."""
    return {key: value for key, value in environment.items() if not _TASTES.fullmatch(key)}
