"""The parameters of ``update_parameters``, and the job script made from them. Pure."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import sbatch_options, sbatch_values, template_settings
from resilio_hpc.slurm.submit.template import FilledTemplate, Template, render

# submitit's name → sbatch's, or this package's below
EQUIVALENT = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "nodes": "nodes",
    "cpus_per_task": "cpus_per_task",
    "gpus_per_node": "gpus_per_node",
    "tasks_per_node": "tasks_per_node",
}
# set by the executor itself
_NOT_THEIRS = {"output", "error", "array", "chdir", "ntasks_per_node"}
OWN = {
    "tasks_per_node": "ranks of each node that trains (1)",
    "spares": "further nodes, which wait to take the place of a lost one (0)",
    "chain": "go on in a new job at the time limit (True)",
    "launch_flags": "more flags of resilio-launch: a list",
    "setup": "shell lines to be run first: a list",
    "teardown": "shell lines to be run when the launch has ended, whatever came of it: a list",
    "template": "a batch script in place of submitit.sbatch",
    "array_parallelism": "tasks of map_array at a time, with chain=False",
    "stderr_to_stdout": "one file for both (False)",
    "any_node": "also nodes that failed lately (False)",
}
VALID = frozenset(OWN) | (frozenset(sbatch_options.BY_KEY) - _NOT_THEIRS)
TASK_MODULE = "resilio_hpc.slurm.submitit_task"


class ParameterError(UsageError, ValueError):
    """A wrong parameter of an executor: submitit's users catch ValueError."""


@contextlib.contextmanager
def as_value_error() -> Iterator[None]:
    """Raise ParameterError where UsageError would be raised."""
    try:
        yield
    except ParameterError:
        raise
    except UsageError as error:
        raise ParameterError(str(error)) from error


@dataclass(frozen=True)
class TaskShape:
    """How many tasks a job has, and on what they run."""

    nodes: int
    spares: int
    tasks_per_node: int
    chain: bool

    @property
    def tasks(self) -> int:
        """The number of results."""
        return self.nodes * self.tasks_per_node


def checked(parameters: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown parameter, or an impossible value."""
    for name, value in parameters.items():
        if name not in VALID:
            near = difflib.get_close_matches(name, VALID, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(sorted(VALID))}"
            raise UsageError(f"no parameter is named {name!r}: {hint}")
        if name in sbatch_options.BY_KEY and as_text(value):
            _option(name, value)
    shape(parameters)
    for name in ("setup", "teardown", "launch_flags"):
        lines = parameters.get(name, [])
        if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
            raise UsageError(f"{name}={lines!r} is not a list of strings")


def shape(parameters: Mapping[str, Any]) -> TaskShape:
    """Return the shape that parameters ask for. Raises UsageError."""
    numbers = {}
    for name, default, check in (
        ("nodes", 1, sbatch_values.count), ("spares", 0, sbatch_values.count_or_none),
        ("tasks_per_node", 1, sbatch_values.count),
    ):  # fmt: skip
        try:
            numbers[name] = int(check(as_text(parameters.get(name, default))))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    chain = bool(parameters.get("chain", True))
    if chain and "array_parallelism" in parameters:
        raise UsageError("array_parallelism needs chain=False: the tasks of a Slurm array cannot be chained")
    return TaskShape(numbers["nodes"], numbers["spares"], numbers["tasks_per_node"], chain)


def converted(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return submitit's general names and units in this package's: memory in GB as sbatch takes it."""
    renamed = {EQUIVALENT.get(name, name): value for name, value in parameters.items()}
    if isinstance(renamed.get("mem"), (int, float)):
        renamed["mem"] = f"{int(renamed['mem'] * 1024)}M"
    return renamed


def as_text(value: Any) -> str:
    """Return a Python value as on a command line: ``["n1", "n2"]`` as ``n1,n2``."""
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(map(str, sorted(value) if isinstance(value, set | frozenset) else value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option(name: str, value: Any) -> str:
    try:
        return sbatch_options.BY_KEY[name].check(as_text(value))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def launch_arguments(parameters: Mapping[str, Any], folder: Path) -> list[str]:
    """Return resilio-launch's arguments beside those of the template."""
    return [*map(str, parameters.get("launch_flags", [])), "-m", TASK_MODULE, str(folder)]


def job_script(
    template: Template,
    parameters: Mapping[str, Any],
    folder: Path,
    log_folder: Path,
    chain_max: int,
    count: int,
    path_entry: str = "",
) -> FilledTemplate:
    """Return the batch script for ``count`` functions (an array, if several). Raises UsageError."""
    wanted = shape(parameters)
    values = {name: as_text(value) for name, value in parameters.items() if name in sbatch_options.BY_KEY}
    values = {name: value for name, value in values.items() if value}  # exclude=[] means nothing
    number = "%A_%a" if count > 1 else "%j"
    values |= {
        "folder": str(folder),
        "nodes": str(wanted.nodes + wanted.spares),
        "ntasks_per_node": str(wanted.tasks_per_node),
        "ranks_per_node": str(wanted.tasks_per_node),
        "spares": str(wanted.spares),
        "chain_max": str(chain_max if wanted.chain else 1),
        "stderr_to_stdout": as_text(bool(parameters.get("stderr_to_stdout", False))),
        "output": f"{str(log_folder).replace('%', '%%')}/{number}_batch.log",
    }
    if count > 1:
        values["array"] = f"0-{count - 1}%{min(count, int(parameters.get('array_parallelism', count)))}"
    known = {key: value for key, value in values.items() if key in template.keys or key in template_settings.BY_KEY}
    return render(
        template, known, launch_arguments(parameters, folder), path_entry, setup_lines=parameters.get("setup", []),
        teardown_lines=torn_down(parameters.get("teardown", [])),
    )  # fmt: skip


def torn_down(teardown: Sequence[str]) -> list[str]:
    """Return shell lines that run the command ``launch`` and then these; none for none.

    Signals are passed on to the launcher, which in a script of its own would be the one to get them. Monitor mode,
    since a shell ignores SIGINT for other processes.
    """
    if not teardown:
        return []
    return [
        "set -m",
        "launcher='' early=''",
        'pass_on() { if [ -n "$launcher" ]; then kill -"$1" "$launcher" 2> /dev/null || true; else early=$1; fi; }',
        *(f"trap 'pass_on {name}' {name}" for name in ("TERM", "INT", "USR2")),
        '"${launch[@]}" & launcher=$!',
        '[ -z "$early" ] || kill -"$early" "$launcher"',
        'until wait "$launcher"; code=$?; ! kill -0 "$launcher" 2> /dev/null; do :; done',
        "set +e",
        *teardown,
        'exit "$code"',
    ]


def local_command(parameters: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    """Return what runs on this machine in place of the batch script.

    The launch, between set-up and teardown if any. A signal during the set-up ends it after the command that runs.
    """
    if not parameters.get("setup") and not parameters.get("teardown"):
        return list(argv)
    lines = ["set -euo pipefail", "trap 'exit 130' INT TERM", *parameters.get("setup", []), "trap - INT TERM"]
    launch = f"launch=({shlex.join(argv)})"
    script = [*lines, launch, *torn_down(parameters.get("teardown", [])), 'exec "${launch[@]}"']
    return ["bash", "-c", "\n".join(script)]
