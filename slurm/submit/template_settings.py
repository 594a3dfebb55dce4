"""The settings that the ready job scripts share: one row per shell variable. Pure.

A script reads a setting as ``NAME=${NAME:-default}  # what it is``; which settings it has, and their defaults, stand
in the script. A variable without a row here (in a site's own script) takes any text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import sbatch_values as v


def path(value: str) -> str:
    """Return a file or directory: any name that is not empty."""
    if not value.strip():
        raise UsageError("it is empty")
    return value


def anything(value: str) -> str:
    """Return any text, line breaks too: it is quoted for the shell."""
    return value


@dataclass(frozen=True)
class LaunchSetting:
    """A setting. ``launch_flag``: the flag of resilio-launch to which the scripts pass it, where it is exactly one."""

    key: str
    check: Callable[[str], str]
    launch_flag: str = ""


SETTINGS = (
    LaunchSetting("ranks_per_node", v.ranks, "--nproc-per-node"),
    LaunchSetting("spares", v.count_or_none, "--spares"),
    LaunchSetting("min_nodes", v.count),
    LaunchSetting("max_nodes", v.count),
    LaunchSetting("node_unit", v.count, "--node-unit"),
    LaunchSetting("chain_max", v.count, "--chain-max"),
    LaunchSetting("run_dir", path),
    LaunchSetting("mpi_type", v.pmi, "--mpi"),
    LaunchSetting("program", v.switch),
    LaunchSetting("image", path),
    LaunchSetting("mounts", anything),
    LaunchSetting("arguments_file", path),
    LaunchSetting("folder", path),
    LaunchSetting("stderr_to_stdout", v.switch),
    LaunchSetting("local_checkpoints", path, "--local-checkpoints"),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
# words of other tools' users, for "did you mean"
OTHER_NAMES = {
    "name": "job_name", "walltime": "time", "timelimit": "time", "timeout": "time", "timeout_min": "time",
    "queue": "partition", "gpus": "gpus_per_node", "cpus": "cpus_per_task", "memory": "mem", "mem_gb": "mem",
    "tasks_per_node": "ranks_per_node", "nproc_per_node": "ranks_per_node", "ranks": "ranks_per_node",
    "nnodes": "nodes", "num_nodes": "nodes", "project": "account", "container": "image", "binds": "mounts",
    "mpi": "mpi_type", "feature": "constraint", "features": "constraint", "workdir": "chdir", "stdout": "output",
    "stderr": "error", "module": "setup", "modules": "setup", "venv": "setup", "conda": "setup",
}  # fmt: skip


def check(key: str, value: str) -> str:
    """Return the value as the script gets it. Raises UsageError."""
    return BY_KEY[key].check(value) if key in BY_KEY else value
