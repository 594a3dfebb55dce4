"""The environment of an srun that the launcher starts inside a user's job. Pure.

Most ``SLURM_*`` variables of a batch script are defaults of srun's own flags (srun(1), "input environment variables").
They are meant for the user's steps. In a step of the launcher with one task per node, ``SLURM_GPUS_PER_TASK`` would
hide GPUs, ``SLURM_EXPORT_ENV=NONE`` the whole environment, and ``SLURM_MEM_PER_NODE`` beside ``SLURM_MEM_PER_CPU`` ends
every srun. Other variables describe the surrounding step (``SLURM_PROCID``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import expand, expand_counts

KEPT = frozenset({
    "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
    "SLURM_JOB_ACCOUNT", "SLURM_JOB_QOS", "SLURM_JOB_USER", "SLURM_JOB_UID", "SLURM_NETWORK",
})  # fmt: skip
KEPT_PREFIXES = ("SLURM_ARRAY_", "SLURM_PMIX_", "SLURM_SPANK_")
OF_SLURM = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "PMI_", "PMI2_", "PMIX_")


def is_slurms(name: str) -> bool:
    """Return whether Slurm, or a PMI that it starts, gives this variable its meaning."""
    return name.startswith(OF_SLURM)


def for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the launcher's own srun.

    Those of the user's, without options of other steps, and without variables of the step in which it runs.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES) or not is_slurms(name)
    }


def gpu_flags(environment: Mapping[str, str], node: str) -> tuple[str, ...]:
    """Return flags of an srun with one task on ``node`` that let the task see all GPUs that the job has there.

    Slurm gives a step all of them, except where the job asks for GPUs per task: then one task's share. ``environment``:
    the batch script's.
    """
    tasks = _tasks_on(environment, node)
    per_task = _count(environment.get("SLURM_GPUS_PER_TASK", "")) or _count(environment.get("SLURM_TRES_PER_TASK", ""))
    return (f"--gpus-per-node={tasks * per_task}",) if tasks * per_task else ()


def _tasks_on(environment: Mapping[str, str], node: str) -> int:
    try:
        nodes = expand(environment.get("SLURM_JOB_NODELIST", ""))
        tasks = expand_counts(environment.get("SLURM_TASKS_PER_NODE", ""))
    except UsageError:
        return 0
    return dict(zip(nodes, tasks, strict=False)).get(node, 0)


def _count(text: str) -> int:
    """Return the number of GPUs: ``2``, ``h100:2``, ``gres/gpu:h100:2``, ``cpu=4,gres/gpu=2``."""
    parts = [part for part in text.split(",") if "=" not in part or "gpu" in part]
    numbers = [re.search(r"(?:^|[:=])(\d+)$", part.strip()) for part in parts if not part.startswith("cpu")]
    return sum(int(found[1]) for found in numbers if found)
