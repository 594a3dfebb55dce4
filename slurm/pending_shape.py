"""Another size for a job that still waits: Slurm lets a pending job ask for more nodes or fewer, not a running one."""

from __future__ import annotations

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.slurm.client import SlurmClient


def reshape_pending(client: SlurmClient, job: str, nodes: int) -> None:
    """Have a pending job of ours ask for so many nodes. Raises UsageError and SlurmError."""
    if nodes < 1:
        raise UsageError(f"a job has at least one node, not {nodes}")
    found = client.jobs([job])
    if not found or found[0].state.base != "PENDING":
        raise SlurmError(f"job {job} is not pending any more: its size stays as it is")
    client.update_job(job, {"NumNodes": f"{nodes}-{nodes}"})  # N alone is the least, refused above the present most
