"""Slurm's variables in a rank: those of the user's own srun line, not those of the agents' steps. Pure.

In a batch script the launcher's own sruns start agents, one per node or group of nodes. Such an srun must not see the
options that are meant for the user's steps (``slurm/client/step_environment``), and each agent gets the variables of a
step that the user did not ask for. So the supervisor sets the user's values aside, in one variable, and the agent
restores them for its ranks. Variables for tasks of a step are set for the round's ranks. docs/launching.md has the
whole table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.protocol.message_parts import Member
from resilio_hpc.slurm.client import step_environment
from resilio_hpc.slurm.client.hostlist import compress, expand_counts

SET_ASIDE = "RESILIO_SET_ASIDE"  # JSON: the user's values of variables that an agent's srun must not see, or changes
CHANGED = ("PWD", "OLDPWD", "PYTHONPATH")  # since agents are started in /
# What srun and slurmd say of the node and of the step as a whole is true of ranks too. All else in a step's environment
# repeats the flags of the launcher's srun (SLURM_CPUS_PER_TASK, SLURM_CPU_BIND) or is set for each rank (``of_task``).
FACTS = frozenset({
    "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_STEP_ID", "SLURM_STEPID",
    "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE", "SLURM_TASK_PID",
    "SLURM_PRIO_PROCESS", "SLURM_UMASK", "SRUN_DEBUG", "SLURMD_DEBUG", "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0",
    "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_GROUP", "SLURM_OOM_KILL_STEP",
})  # fmt: skip


@dataclass(frozen=True)
class SlurmTask:
    """The place of one rank in its round. ``ranks``: of this node; ``world_size``: of the round."""

    node_rank: int
    local_rank: int
    rank: int
    ranks: int
    world_size: int


def for_agents(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the srun that starts agents: what it must not see is set aside for the ranks."""
    kept = step_environment.for_srun(environment)
    aside = {name: value for name, value in environment.items() if name in CHANGED or step_environment.is_slurms(name)}
    if "PYTHONPATH" in kept:  # relative to the user's directory; agents are started in /
        kept["PYTHONPATH"] = absolute_path_list(kept["PYTHONPATH"], os.getcwd())  # noqa: PTH109
    return {**kept, SET_ASIDE: json.dumps(aside)}


def absolute_path_list(paths: str, directory: str) -> str:
    """Return a PYTHONPATH that means the same in any directory; an empty entry is the directory itself."""
    return os.pathsep.join(os.path.join(directory, entry) for entry in paths.split(os.pathsep)) if paths else paths  # noqa: PTH118


def of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an agent's ranks, without the variables of ``of_task``.

    Nothing changes where the agent was not started by the launcher's srun.
    """
    if SET_ASIDE not in environment:
        return dict(environment)
    aside: dict[str, str] = json.loads(environment[SET_ASIDE])
    kept = {name: value for name, value in environment.items() if name in FACTS or not _is_set_aside(name)}
    return {**aside, **kept}


def _is_set_aside(name: str) -> bool:
    if name.startswith("SLURM_SPANK_"):  # a site's plug-in sets it for every task
        return False
    return name in CHANGED or name == SET_ASIDE or step_environment.is_slurms(name)


def of_task(base: Mapping[str, str], members: Sequence[Member], task: SlurmTask) -> dict[str, str]:
    """Return a step's variables for one of its tasks, set for a rank. ``base``: what ``of_ranks`` returned.

    Where the job has as many tasks per node as the round has ranks, each rank is what a task of a plain ``srun`` would
    be; otherwise each node has one task, as with ``srun --ntasks-per-node=1 torchrun``.
    """
    rank_is_task = _tasks_per_node(base) == task.ranks and task.world_size == task.ranks * len(members)
    each = task.ranks if rank_is_task else 1
    first = task.rank - task.local_rank if rank_is_task else task.node_rank
    nodes, tasks = str(len(members)), str(len(members) * each)
    names = compress([member.node for member in members])
    per_node = f"{each}(x{nodes})" if len(members) > 1 else str(each)
    return {
        "SLURM_NODEID": str(task.node_rank),
        "SLURM_PROCID": str(first + (task.local_rank if rank_is_task else 0)),
        "SLURM_LOCALID": str(task.local_rank if rank_is_task else 0),
        "SLURM_GTIDS": ",".join(str(first + number) for number in range(each)),
        "SLURM_NNODES": nodes,
        "SLURM_NODELIST": names,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


def _tasks_per_node(base: Mapping[str, str]) -> int:
    """Return the job's tasks per node, 0 where nodes differ or it is not told."""
    try:
        counts = set(expand_counts(base.get("SLURM_TASKS_PER_NODE", "")))
    except UsageError:
        return 0
    return counts.pop() if len(counts) == 1 else 0
