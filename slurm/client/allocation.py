"""The allocation in which this process runs, from the environment that Slurm sets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import expand, expand_counts

# Slurm numbers the batch script, an interactive shell and similar steps from here on (SLURM_MAX_NORMAL_STEP_ID). From
# 24.11 on a batch script has such a number in its environment, before that none.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Allocation:
    """An allocation. ``in_step``: this process is a task of an srun step (else of the batch script).

    ``task``: its number.
    """

    job: str
    nodes: tuple[str, ...]
    node: str
    in_step: bool
    task: int = 0
    local_task: int = 0
    cpus_per_node: tuple[int, ...] = ()
    restart_count: int = 0
    array: str = ""


def detect(environment: Mapping[str, str]) -> Allocation | None:
    """Return the allocation, or None outside of one.

    Raises UsageError where Slurm's variables contradict each other.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    if environment.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        raise UsageError(
            f"job {job} is heterogeneous ({environment['SLURM_HET_SIZE']} components), which is not supported: submit "
            "one component as a job of its own, and add the others with resilio-launch --join"
        )
    step = environment.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and "SLURM_PROCID" in environment
    names = environment.get("SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST") or environment.get(
        "SLURM_NODELIST", ""
    )
    nodes = tuple(expand(names))
    node = environment.get("SLURMD_NODENAME", "")
    if nodes and not node:
        raise UsageError(
            f"job {job} holds {names}, and this host is none of its nodes (the shell of salloc on a login node?): "
            "start it there, as the one task of each node: srun --no-kill --kill-on-bad-exit=0 --wait=0 "
            "--ntasks-per-node=1 resilio-launch …; or --standalone to run on this host alone"
        )
    if not nodes:
        raise UsageError(
            f"SLURM_JOB_ID={job} is set, but no node list: run inside a batch script or srun, or unset SLURM_JOB_ID "
            "(or use --standalone) to run on this machine alone"
        )
    counts = environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    return Allocation(
        job,
        nodes,
        node,
        in_step,
        int(environment.get("SLURM_PROCID", "0")),
        int(environment.get("SLURM_LOCALID", "0")),
        tuple(expand_counts(counts)) if counts and not in_step else (),
        int(environment.get("SLURM_RESTART_COUNT", "0")),
        environment.get("SLURM_ARRAY_JOB_ID", ""),
    )
