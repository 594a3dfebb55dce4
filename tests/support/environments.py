"""What the programs that tests start find: their environment, and a way to their files."""

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


def open_the_way_to(folder: Path) -> None:
    """Let other users enter ``folder`` and what is above it, as far as it is ours: pytest's own folders are private."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
