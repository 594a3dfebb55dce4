"""The one place that starts Slurm's commands, with a time limit, in an environment without a user's settings.

Slurm's commands take options from variables (SQUEUE_PARTITION, SLURM_TIME_FORMAT …). A question or an order runs
without any of them, so that its answer is the same for every user; only variables that tell where Slurm is and how to
authenticate stay. A submission keeps them: they are its user's choice.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from resilio_hpc.core.process import Completed, run

# future versions may have other variables of these families: all go, except _KEPT
_SETTINGS = re.compile(
    r"(?:SLURMD?|SQUEUE|SINFO|SACCT|SACCTMGR|SCONTROL|SCANCEL|SDIAG|SPRIO|SREPORT|SRUN|SSHARE|SSTAT|SBATCH|SALLOC)_.*"
    r"|LANG|LANGUAGE|LC_.*"
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"})
READING = MappingProxyType({"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"})
"""Times as Unix seconds, which need no time zone; words as in the manual."""
_SUBMITS = frozenset({"sbatch", "salloc"})
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Runner(Protocol):
    """Runs a command of Slurm; raises CommandError as ``core.process.run`` does."""

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        """Return the finished command.

        ``extra``: variables set on top of its environment; a question about times names READING, which ``run_here``
        adds to all, since a runner may start the command elsewhere.
        """


def run_here(
    argv: Sequence[str],
    timeout_s: float,
    extra: Mapping[str, str] = _NOTHING,
    *,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> Completed:
    """Run a command of Slurm on this machine. ``environment``: the user's (default: this process's).

    Raises CommandError.
    """
    given = os.environ if environment is None else environment
    return run(argv, timeout_s, env={**environment_of(argv[0], given), **extra}, stdin=stdin)


def start_here(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a question whose answer comes through a pipe, for a caller that must not wait. Raises OSError."""
    return subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True, env=environment_of(argv[0], os.environ),
    )  # fmt: skip


def environment_of(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a user's environment that one of Slurm's commands sees. Pure.

    A submission loses only SBATCH_WAIT: sbatch would return when the job ends, not when it is submitted.
    """
    if program in _SUBMITS:
        return {name: value for name, value in environment.items() if name != "SBATCH_WAIT"}
    own = {name: value for name, value in environment.items() if name in _KEPT or not _SETTINGS.fullmatch(name)}
    return {**own, **READING}
