"""Slurm access: the job's allocation, one client for every Slurm, drains, the chain of jobs, job scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilio_hpc.slurm.submit.submitit_executor import ResilioExecutor

__all__ = ["ResilioExecutor"]


def __getattr__(name: str) -> Any:
    """Import submitit when its executor is asked for: the launcher, which imports this package, does not need it."""
    if name == "ResilioExecutor":
        from resilio_hpc.core.extras import require

        require("submitit", "ResilioExecutor")
        from resilio_hpc.slurm.submit.submitit_executor import ResilioExecutor

        return ResilioExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
