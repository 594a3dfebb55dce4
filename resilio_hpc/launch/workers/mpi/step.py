"""The srun step that starts all ranks of an MPI round: its command, environment and hostfile. Pure.

Ranks get their PMI from slurmstepd, so one step holds the whole world of a round. It is started by the agent of node
rank 0, inside of that agent's own step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core import interpreter
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.slurm.client.step_environment import for_srun

SURVIVAL_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


def step_environment(environment: Mapping[str, str], hostfile: Path) -> dict[str, str]:
    """Return the environment of srun: this process's, without variables of the step in which it runs."""
    return {**for_srun(environment), "SLURM_HOSTFILE": str(hostfile)}


def hostfile_text(members: Sequence[m.Member]) -> str:
    """Return one line per task: with ``--distribution=arbitrary`` task r runs on the node of line r."""
    ordered = sorted(members, key=lambda member: member.first_rank)
    return "".join(f"{member.node}\n" * member.local_world_size for member in ordered)


def srun_argv(
    mpi: str, members: Sequence[m.Member], environment: Mapping[str, str], task: Sequence[str]
) -> tuple[str, ...]:
    """Return the command of one step over all members, whose task r is rank r by the hostfile.

    There may be more ranks than CPUs; each sees all CPUs of its node.
    """
    world = sum(member.local_world_size for member in members)
    # where Slurm binds, it sets this variable
    unbound = ("--cpu-bind=none",) if "SLURM_CPU_BIND" in environment else ()
    return (
        "srun", *SURVIVAL_FLAGS, "--overlap", "--export=ALL", "--overcommit", f"--jobid={environment['SLURM_JOB_ID']}",
        f"--nodes={len(members)}", f"--ntasks={world}", "--distribution=arbitrary", *unbound,
        f"--mpi={mpi}", "--input=none", "--unbuffered", "--job-name=resilio-mpi", *task,
    )  # fmt: skip


def task_argv(run_id: str, round_number: int) -> tuple[str, ...]:
    """Return the command of each task, which asks the agent of its node for its rank (``task``)."""
    return (sys.executable, "-u", "-c", interpreter.source("launch.workers.mpi.task"), run_id, str(round_number))
