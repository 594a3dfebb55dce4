"""Checks of a job before it waits in the queue for hours, with the launcher's own checks."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli import checks
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.submit import limits, template_settings
from resilio_hpc.slurm.submit.limits import node_count
from resilio_hpc.slurm.submit.template import FilledTemplate, Template


def check(
    template: Template, job: FilledTemplate, command: Sequence[str], environment: Mapping[str, str], cwd: Path
) -> None:
    """Raise UsageError for what resilio-launch would refuse in the job, and for missing files."""
    directory = cwd / job.options.get("chdir", ".")
    if not directory.is_dir():
        raise UsageError(f"chdir={directory}: there is no such directory here (--no-check: it is there on the nodes)")
    for key in ("output", "error"):
        _check_folder(key, job.options.get(key, ""), directory)
    if "array" in job.options and "chain_max" in job.settings:
        raise UsageError(
            f"array: the jobs of template {template.name} are chained, and the next job of one task would be the whole "
            "array again: take the template sweep, or submit one job per task"
        )
    _check_file("arguments_file", job.settings.get("arguments_file", ""), directory)
    if not template.takes_command:
        return
    argv = [*launch_flags(job), *command]
    caller = Caller(_inside(job, environment), directory, time.time(), 1)
    try:
        options = parse(argv, caller).options
        if "image" not in job.settings:  # then the command is inside of the image
            checks.check_program(options, caller.environment, directory)
    except UsageError as error:
        raise UsageError(f"resilio-launch would say: {error}") from None
    except SystemExit:
        raise UsageError("the command asks for resilio-launch's --help or --version: it has to be SCRIPT …") from None


def check_fits(options: Mapping[str, str], given: Collection[str], client: SlurmClient) -> None:
    """Raise UsageError for a job that can never start, as far as Slurm tells. ``given``: keys of its user's."""
    site = limits.asked(client, options)
    why = "" if site is None else limits.never_starts(options, given, site)
    if why:
        raise UsageError(f"this job can never start: {why} (--no-check submits it all the same)")


def launch_flags(job: FilledTemplate) -> list[str]:
    """Return the flags that the script gives resilio-launch beside the command. Pure."""
    flags = [
        f"{setting.launch_flag}={job.settings[setting.key]}"
        for setting in template_settings.SETTINGS
        if setting.launch_flag and setting.key in job.settings
    ]
    if "min_nodes" in job.settings:
        most = job.settings.get("max_nodes", "")
        flags.append(f"--nnodes={job.settings['min_nodes']}:{most if most.isdecimal() else node_count(job.options)}")
    if job.settings.get("program") == "true" or "image" in job.settings:
        flags.append("--no-python")
    return flags


def _inside(job: FilledTemplate, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which the launcher would run."""
    foreign = ("SLURM_", "RESILIO_")
    own = {name: value for name, value in environment.items() if not name.startswith(foreign)}
    return own | {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(node_count(job.options))}


def _check_file(key: str, name: str, directory: Path) -> None:
    if name and not (directory / name).is_file():
        raise UsageError(f"{key}={name}: there is no such file in {directory}")


def _check_folder(key: str, pattern: str, directory: Path) -> None:
    """Check that the directory exists: sbatch makes none, and a job without a place for its output fails silently."""
    folder = (directory / pattern).parent
    if "%" in str(folder):
        raise UsageError(f"{key}={pattern}: sbatch makes no directory {folder}: put %j into the file's name instead")
    if pattern and not folder.is_dir():
        raise UsageError(
            f"{key}={pattern}: there is no directory {folder}: make it first (--no-check: it is there on the nodes)"
        )
