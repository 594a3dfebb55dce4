"""Jobs that add nodes to a run of another job: submitted like that one, and told apart by their Comment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.chain.successor_options import EMPTY
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.submit import submission, template_files
from resilio_hpc.slurm.submit.template import render

MARK = "resilio joiner of"
LONGEST_S = 4 * 3600.0  # a longer joiner would start later, and leaves before its end anyway
SHORTEST_S = 60.0
# field of scontrol → key of the template, where the value needs no change
_SAME = (
    ("Partition", "partition"), ("Account", "account"), ("QOS", "qos"), ("Reservation", "reservation"),
    ("Features", "constraint"),
)  # fmt: skip


def comment_of(run_id: str) -> str:
    """Return the Comment of a run's joiners."""
    return f"{MARK} {run_id}"


def joiners_of(run_id: str, user_id: int, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return a run's joiners that have not ended.

    Any user can write a Comment, so it must be the user's own job. Pure.
    """
    return tuple(
        job for job in jobs
        if job.comment == comment_of(run_id) and job.user_id == user_id and job.state.known and not job.state.ended
    )  # fmt: skip


def joiner_values(
    fields: Mapping[str, str], run_id: str, run_path: Path, taken: Sequence[str], ends_in_s: float | None
) -> dict[str, str]:
    """Return keys and values of the template ``joiner`` for nodes like those of the run's own job. Pure.

    ``fields``: scontrol's of that job. ``taken``: nodes that take part already: where jobs share nodes, another agent
    could not start there.
    """
    values = {key: fields[field] for field, key in _SAME if fields.get(field, "") not in EMPTY}
    older = "NODE" if fields.get("OverSubscribe") == "NO" else "NO"
    values["exclusive"] = "true" if fields.get("Exclusive", older) == "NODE" else "false"
    memory = memory_mb(fields.get("MinMemoryNode", ""))
    if memory:
        values["mem"] = f"{memory}M"
    if any(fields.get(f"TresPer{whom}", "") not in EMPTY for whom in ("Job", "Task", "Socket")):
        values["gpus_per_node"] = ""  # it does not tell the number for each node: see ``submit_joiner``
    else:
        values["gpus_per_node"], others = _gpus(fields.get("TresPerNode", ""))
        values |= {"gres": others} if others else {}
    cpus = fields.get("CPUs/Task", "1")
    if cpus.isdecimal() and int(cpus) > 1:
        values["cpus_per_task"] = cpus
    if taken:
        values["exclude"] = compress(list(taken))
    lasts_s = min(LONGEST_S, max(SHORTEST_S, ends_in_s if ends_in_s is not None else math.inf))
    values["time"] = str(math.ceil(lasts_s / 60))
    values["job_name"] = "joiner"
    values["comment"] = comment_of(run_id)
    values["chdir"] = str(run_path)
    values["output"] = str(run_path / "joiners" / "%j.out")
    values["run_dir"] = str(run_path)
    return values


def _gpus(tres: str) -> tuple[str, str]:
    """Return ``gres:gpu:h100:8,gres:nic:2`` → ("h100:8", "nic:2"); without GPUs ("0", …). Pure."""
    entries = [] if tres in EMPTY else [one.removeprefix("gres:").removeprefix("gres/") for one in tres.split(",")]
    gpus = [one.partition(":")[2] or "1" for one in entries if one.split(":")[0] == "gpu"]
    return ",".join(gpus) or "0", ",".join(one for one in entries if one.split(":")[0] != "gpu")


def memory_mb(text: str) -> int:
    """Return ``62.50G`` → 64000, in mebibytes; 0 where nothing is said. Pure."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([MGT]?)", text)
    return math.ceil(float(found[1]) * 1024 ** "MGT".index(found[2] or "M")) if found else 0


def render_joiner(values: Mapping[str, str], nodes: int) -> tuple[str, tuple[str, ...]]:
    """Return the batch script of a joiner, and sbatch's arguments. Raises UsageError."""
    if not values.get("gpus_per_node", "0"):
        raise UsageError(
            "the run's job asks for GPUs per job, task or socket: say how many a node has, gpus_per_node=8"
        )
    template = template_files.load("joiner")
    job = render(template, {**values, "nodes": str(nodes)}, (), submission.launcher_directory(os.environ))
    return job.script, job.arguments


def submit_joiner(values: Mapping[str, str], nodes: int) -> str:
    """Submit a joiner of so many nodes; return its job number.

    Raises UsageError and SlurmError, as submission.submit.
    """
    script, arguments = render_joiner(values, nodes)
    return submission.submit(script, arguments, submission.own_environment(os.environ)).job


def leave(job: str) -> None:
    """Ask a joiner's nodes to leave after the next commit. Raises SlurmError.

    To agents, USR2 means that their job ends soon: a joiner's then leave at the best moment before that.
    """
    commands.cancel(job, "USR2")


def end(job: str) -> None:
    """End a joiner: its nodes leave at once, within the grace time of the job. Raises SlurmError."""
    commands.cancel(job)
