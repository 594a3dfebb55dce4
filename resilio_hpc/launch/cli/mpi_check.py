"""Whether this Slurm can give ranks the PMI of ``--mpi``, known before anything is started."""

from __future__ import annotations

import re

from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.slurm.client.runner import run_here

_LIST_TIMEOUT_S = 20.0


def check(mpi: str, in_slurm: bool) -> None:
    """Raise UsageError where no step with this PMI is possible."""
    if not in_slurm:
        raise UsageError(
            f"--mpi={mpi}: the ranks get their PMI from Slurm's srun, but this is no Slurm job: submit the launch "
            "with sbatch (sbatch_templates/mpi.sbatch), or leave --mpi out"
        )
    try:
        listed = run_here(["srun", "--mpi=list"], _LIST_TIMEOUT_S)
    except CommandError:
        return  # srun itself will report the error
    known = plugin_types(listed.stdout + listed.stderr)
    if known and mpi not in known:
        raise UsageError(f"--mpi={mpi}: this Slurm has {', '.join(known)}")


def plugin_types(listed: str) -> list[str]:
    """Return the types in the answer to ``srun --mpi=list``.

    Slurm prints one per line, or, from 22.05, versions in a last line.
    """
    types = re.findall(r"^(?:srun: )?\s*([a-z][a-z0-9_]*)\s*$", listed, re.MULTILINE)
    for versions in re.findall(r"plugin versions available: (.*)$", listed, re.MULTILINE):
        types += [version.strip() for version in versions.split(",")]
    return [name for name in dict.fromkeys(types) if name and name != "none"]
