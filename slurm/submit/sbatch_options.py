"""The options of sbatch that a template or an executor may be given, one row each, and how a #SBATCH line is written.

sbatch takes a #SBATCH line apart by itself, not by a shell: quotes of either kind group words, a backslash takes the
next character as it is (within quotes too), # begins a comment, and nothing is expanded. So a value in double quotes,
with backslashes before ``"`` and ``\\``, is any text that has no line break (tried on 22.05.8).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.slurm.submit import sbatch_values as v


@dataclass(frozen=True)
class SbatchOption:
    """An option. ``key``: as users write it; ``check``: value → value as sbatch takes it, raises UsageError."""

    key: str
    check: Callable[[str], str]
    help: str
    is_switch: bool = False

    @property
    def flag(self) -> str:
        """Return ``--gpus-per-node``."""
        return "--" + self.key.replace("_", "-")


OPTIONS = (
    SbatchOption("job_name", v.text, "name of the job"),
    SbatchOption("nodes", v.nodes, "nodes of the job, spares included: 4, or 2-4"),
    SbatchOption("gpus_per_node", v.gpus, "GPUs of each node: 8, h100:8, 0"),
    SbatchOption("cpus_per_task", v.count, "CPUs of each task"),
    SbatchOption("ntasks_per_node", v.count, "tasks of each node"),
    SbatchOption("mem", v.memory, "memory of each node: 64G; 0 is all of it"),
    SbatchOption("mem_per_cpu", v.memory, "memory per CPU"),
    SbatchOption("mem_per_gpu", v.memory, "memory per GPU"),
    SbatchOption("time", v.time, "time limit: minutes, HH:MM:SS, DAYS-HH:MM:SS"),
    SbatchOption("exclusive", v.switch, "whole nodes: true or false", is_switch=True),
    SbatchOption("partition", v.word, "partition, or several: a,b"),
    SbatchOption("account", v.word, "account"),
    SbatchOption("qos", v.word, "quality of service"),
    SbatchOption("reservation", v.word, "reservation"),
    SbatchOption("constraint", v.text, "features that nodes must have: a100&ib, or [a100|h100]: all of one kind"),
    SbatchOption("nodelist", v.hosts, "nodes that must be among them: n[1-3]"),
    SbatchOption("exclude", v.hosts, "nodes that must not: n[1-3]"),
    SbatchOption("switches", v.word, "network switches at most: 1@2:00:00"),
    SbatchOption("gres", v.word, "generic resources of each node: gpu:h100:8"),
    SbatchOption("licenses", v.word, "licenses"),
    SbatchOption("array", v.array, "tasks of the array: 0-7, 0-99%4"),
    SbatchOption("output", v.text, "file of the output: %x-%j.out"),
    SbatchOption("error", v.text, "file of the error output, if not the same"),
    SbatchOption("chdir", v.text, "directory in which the job runs"),
    SbatchOption("comment", v.text, "comment"),
    SbatchOption("dependency", v.word, "start after others: afterok:123, singleton"),
    SbatchOption("begin", v.moment, "start no earlier"),
    SbatchOption("deadline", v.moment, "end no later"),
    SbatchOption("nice", v.whole, "lower priority by this"),
    SbatchOption("signal", v.signal, "warning before the end: USR2@120"),
    SbatchOption("mail_type", v.word, "when to send mail: END,FAIL"),
    SbatchOption("mail_user", v.word, "to whom"),
    SbatchOption("wckey", v.word, "workload characterisation key"),
    SbatchOption("bb", v.text, "burst buffer specification"),
    SbatchOption("bbf", v.text, "file of a burst buffer specification"),
    SbatchOption("hold", v.switch, "submit held: true or false", is_switch=True),
    SbatchOption("requeue", v.switch, "whether Slurm may requeue the job: true or false", is_switch=True),
)
BY_KEY = {option.key: option for option in OPTIONS}


def quoted(value: str) -> str:
    """Return a value in the syntax of a #SBATCH line."""
    if re.fullmatch(r"[\w@%+=:,./\[\]|&*-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def argument(option: SbatchOption, value: str) -> str:
    """Return one word of sbatch's command line; "" where the value means that the option is not given."""
    if not option.is_switch:
        return f"{option.flag}={value}"
    if option.key == "requeue":
        return "--requeue" if value == "true" else "--no-requeue"
    return option.flag if value == "true" else ""


def sbatch_line(option: SbatchOption, value: str) -> str:
    """Return a #SBATCH line; "" where the value means that the option is not given."""
    if option.is_switch:
        word = argument(option, value)
        return f"#SBATCH {word}" if word else ""
    return f"#SBATCH {option.flag}={quoted(value)}"
