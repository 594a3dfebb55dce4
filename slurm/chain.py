"""Chained jobs: the successor is submitted at the start and waits for this job's end (CARD-5, NVX-5).

A successor submitted at the start survives everything that can happen to this job, loss of the batch host included;
it starts in the second in which this one ends, and is cancelled when the run completes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
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


def successor_arguments(
    fields: Mapping[str, str], job: str, nodes: int, script: Path, text: str = "", words: Sequence[str] = ()
) -> list[str]:
    """sbatch's arguments for the next job, from ``scontrol show job``'s fields of this one. Pure.

    The batch script's own ``#SBATCH`` lines hold as well; what was given on sbatch's command line is repeated here.
    ``text``: the script's; ``words``: arguments known to this process, some of them the script's.
    """
    arguments = [f"--dependency=afterany:{job}", "--no-kill", f"--nodes={nodes}", "--export=ALL"]
    for field, option in REPEATED:
        value = fields.get(field, "")
        if value not in EMPTY:
            arguments.append(f"{option}={value}")
    arguments += generic_resources(fields.get("TresPerNode", ""), text)
    for field, option in (("StdOut", "--output"), ("StdErr", "--error")):
        value = fields.get(field, "")
        if value not in EMPTY and (field == "StdOut" or value != fields.get("StdOut")):
            arguments.append(f"{option}={re.sub(rf'(?<![0-9]){re.escape(job)}(?![0-9])', '%j', value)}")
    return [*arguments, "--open-mode=append", str(script), *script_arguments(fields.get("Command", ""), words)]


def generic_resources(value: str, text: str) -> list[str]:
    """Options that ask for a job's TresPerNode (``gres:gpu:4``) again. Pure.

    sbatch adds ``--gres`` to what the script's ``#SBATCH --gpus-per-node`` asks for, so the same option must be used.
    """
    if value in EMPTY:
        return []
    entries = [entry.removeprefix("gres:").removeprefix("gres/") for entry in value.split(",")]
    options = []
    if re.search(r"^#SBATCH\s.*--gpus-per-node\b", text, re.MULTILINE):
        gpus = [entry for entry in entries if entry.split(":")[0] == "gpu"]
        entries = [entry for entry in entries if entry not in gpus]
        options = [f"--gpus-per-node={','.join(entry.partition(':')[2] or '1' for entry in gpus)}"] if gpus else []
    return [*options, *([f"--gres={','.join(entries)}"] if entries else [])]


def script_arguments(command: str, words: Sequence[str]) -> list[str]:
    """A batch script's own arguments, from the job's Command, which joins script and arguments by spaces. Pure.

    An argument that holds spaces is put together again if it is among ``words``.
    """
    pieces = command.split(" ")[1:] if command not in EMPTY else []
    known = sorted((word.split(" ") for word in words if " " in word), key=len, reverse=True)
    arguments = []
    while pieces:
        length = next((len(parts) for parts in known if pieces[: len(parts)] == parts), 1)
        arguments.append(" ".join(pieces[:length]))
        del pieces[:length]
    return arguments


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
    arguments = successor_arguments(fields, job, nodes, script, script.read_text(errors="replace"), sys.argv)
    successor = commands.submit(arguments, successor_environment(os.environ, run_path, number, job))
    known = [link for link in read_links(run_path) if link.number < number]
    link = Link(number + 1, successor)
    write_links(run_path, [*known, Link(number, job), link])
    return link
