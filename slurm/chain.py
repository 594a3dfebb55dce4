"""Chained jobs: the successor is submitted at the start and waits for this job's end (CARD-5, NVX-5).

A successor submitted at the start survives everything that can happen to this job, loss of the batch host included;
it starts in the second in which this one ends, and is cancelled when the run completes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.slurm import commands

# What of a running job's description its successor repeats: field of scontrol → option of sbatch.
REPEATED = (
    ("JobName", "--job-name"),
    ("Partition", "--partition"),
    ("Account", "--account"),
    ("QOS", "--qos"),
    ("TimeLimit", "--time"),
    ("WorkDir", "--chdir"),
    ("Features", "--constraint"),
    ("TresPerNode", "--gres"),
    ("Comment", "--comment"),
)
EMPTY = ("", "(null)", "N/A")


@dataclass(frozen=True)
class Link:
    """One job of a chain. ``number`` counts from 1."""

    number: int
    job: str


def read_links(run_path: Path) -> list[Link]:
    """The chain so far; empty when there is none or the file is damaged."""
    try:
        entries = json.loads((run_path / "chain.json").read_text())["links"]
        return [Link(int(entry["number"]), str(entry["job"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_links(run_path: Path, links: list[Link]) -> None:
    """Store the chain."""
    write_atomic(run_path / "chain.json", json.dumps({"v": 1, "links": [asdict(link) for link in links]}).encode())


def link_number(environment: Mapping[str, str]) -> int:
    """Which job of the chain this is, from 1."""
    text = environment.get("RESILIO_LINK", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def successor_arguments(fields: Mapping[str, str], job: str, nodes: int, script: Path) -> list[str]:
    """sbatch's arguments for the next job, from ``scontrol show job``'s fields of this one. Pure.

    The batch script's own ``#SBATCH`` lines hold as well; what was given on sbatch's command line is repeated here.
    """
    arguments = [f"--dependency=afterany:{job}", "--no-kill", f"--nodes={nodes}", "--export=ALL"]
    for field, option in REPEATED:
        value = fields.get(field, "")
        if value not in EMPTY:
            arguments.append(f"{option}={value.removeprefix('gres:').removeprefix('gres/')}")
    for field, option in (("StdOut", "--output"), ("StdErr", "--error")):
        value = fields.get(field, "")
        if value not in EMPTY and (field == "StdOut" or value != fields.get("StdOut")):
            arguments.append(f"{option}={re.sub(rf'(?<![0-9]){re.escape(job)}(?![0-9])', '%j', value)}")
    return [*arguments, "--open-mode=append", str(script)]


def successor_environment(environment: Mapping[str, str], run_path: Path, number: int, job: str) -> dict[str, str]:
    """The next job's environment: the user's own without this job's Slurm variables, and where to go on. Pure."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    for name in ("SLURM_CONF", "SBATCH_RESERVATION", "SLURM_CLUSTERS"):
        if name in environment:
            kept[name] = environment[name]
    return kept | {
        "RESILIO_RUN_DIR": str(run_path),
        "RESILIO_LINK": str(number + 1),
        "RESILIO_PREDECESSOR": job,
    }


def submit_successor(run_path: Path, job: str, nodes: int) -> Link:
    """Submit the next job of the chain and note it. Raises SlurmError."""
    number = link_number(os.environ)
    script = run_path / f"batch-{job}.sh"
    commands.batch_script(job, script)
    fields = commands.job_fields(job)
    arguments = successor_arguments(fields, job, nodes, script)
    successor = commands.submit(arguments, successor_environment(os.environ, run_path, number, job))
    known = [link for link in read_links(run_path) if link.number < number]
    link = Link(number + 1, successor)
    write_links(run_path, [*known, Link(number, job), link])
    return link
