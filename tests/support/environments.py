"""Environments for the programs that tests start, without what belongs to the test run or to a job around it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

SUPPORT = ROOT / "tests" / "support"

FOREIGN = ("SLURM", "SBATCH", "SRUN", "SQUEUE", "PET_", "TORCH", "RESILIO", "OMPI_", "PMI", "CUDA_", "SHIM_")
"""A variable with one of these prefixes changes what a launch does."""


def scrubbed(*also: str, **additions: str | Path) -> dict[str, str]:
    """Return this process's environment without foreign variables, with the checkout importable.

    ``also`` are further prefixes to leave out. ``additions`` are variables to set.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*FOREIGN, *also))}
    return {**kept, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in additions.items()}}
