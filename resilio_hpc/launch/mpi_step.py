"""The srun step that starts all ranks of an MPI round: its command, environment and hostfile. Pure.

Ranks get their PMI from slurmstepd, so one step holds the whole world of a round. It is started by the agent of node
rank 0, inside of that agent's own step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.launch import bootstrap
from resilio_hpc.launch import messages as m

SURVIVAL_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# What srun may see of Slurm's variables. All others describe the step around us (SLURM_PROCID), or are defaults of
# srun's own flags (srun(1), "input environment variables") that were meant for another step (SLURM_NTASKS).
_KEPT = {
    "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
    "SLURM_JOB_ACCOUNT", "SLURM_JOB_QOS", "SLURM_JOB_USER", "SLURM_JOB_UID", "SLURM_NETWORK",
}  # fmt: skip
_KEPT_PREFIXES = ("SLURM_ARRAY_", "SLURM_PMIX_")
_OF_THE_STEP = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "PMI_", "PMI2_", "PMIX_")


def step_environment(environment: Mapping[str, str], hostfile: Path) -> dict[str, str]:
    """The environment of srun: ours without what belongs to the step that we are in."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES) or not name.startswith(_OF_THE_STEP)
    }
    return {**kept, "SLURM_HOSTFILE": str(hostfile)}


def hostfile_text(members: Sequence[m.Member]) -> str:
    """A line per task: with ``--distribution=arbitrary`` task r runs on the node of line r."""
    ordered = sorted(members, key=lambda member: member.first_rank)
    return "".join(f"{member.node}\n" * member.local_world_size for member in ordered)


def srun_argv(
    mpi: str, members: Sequence[m.Member], environment: Mapping[str, str], task: Sequence[str]
) -> tuple[str, ...]:
    """One step over all members whose task r is rank r, by the hostfile.

    Ranks may outnumber the CPUs, and see all of their node's.
    """
    world = sum(member.local_world_size for member in members)
    unbound = ("--cpu-bind=none",) if "SLURM_CPU_BIND" in environment else ()  # where Slurm binds, it says so
    return (
        "srun", *SURVIVAL_FLAGS, "--overlap", "--overcommit", f"--jobid={environment['SLURM_JOB_ID']}",
        f"--nodes={len(members)}", f"--ntasks={world}", "--distribution=arbitrary", *unbound,
        f"--mpi={mpi}", "--input=none", "--unbuffered", "--job-name=resilio-mpi", *task,
    )  # fmt: skip


def task_argv(run_id: str, round_number: int) -> tuple[str, ...]:
    """What each task runs: it asks the agent of its node what to be (``mpi_task``)."""
    return (sys.executable, "-u", "-c", bootstrap.source("mpi_task"), run_id, str(round_number))
