"""``resilio plan … --submit SCRIPT``: the ranking, walked down until Slurm takes a choice. RES-21."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.evaluate import Attempt, Evaluator, Patience
from resilio_hpc.cli.common.submit_check import check
from resilio_hpc.cli.plan.emit import launch_command
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.launch.config.rank_layout import Layout, fill, values_of
from resilio_hpc.slurm.submit import submission, template_files
from resilio_hpc.slurm.submit.template import Template, normalised, render
from resilio_hpc.slurm.submit.trial import Request, Trials

NONE_TAKEN = 3
HELP = """\
--submit SCRIPT hands the best choice to Slurm. SCRIPT is a training script (train.py, which resilio-launch then runs),
a template of resilio submit --list, or a batch script of your own. Nodes, GPUs of each node and partition are the
choice's; other options of sbatch are given by --set KEY=VALUE (resilio submit --explain multi-node lists them).
The job finds RESILIO_TP, RESILIO_PP, RESILIO_DP, RESILIO_MICRO_BATCH … in its environment; in what stands behind --
the words {tp} {pp} {dp} {cp} {ep} {vpp} {zero} {micro_batch} {global_batch} {accumulation} {recompute} {world_size}
{nodes} {ranks_per_node} become numbers. Spare nodes of a template (spares=N) are asked for beside those of the choice.
Each choice is first tested (sbatch --test-only). A job that does not start
since its nodes were drained or taken meanwhile is cancelled, and the next choice has its turn.

exit codes with --submit:
  0  a job has started, or waits for a start within --max-wait (--dry-run: would be submitted)
  1  Slurm did not answer, or takes no job of yours
  2  a mistake in the command line
  3  Slurm could start none of the choices
"""
_EXPORT = re.compile(r"^#SBATCH\b.*?\s--export[= ](\S+)", re.MULTILINE)
_OF_THE_CHOICE = ("nodes", "gpus", "gpus_per_node", "gpus_per_task", "partition", "ranks_per_node")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``--submit``."""
    group = parser.add_argument_group("submitting")
    group.add_argument("--submit", metavar="SCRIPT", help="the best choice that Slurm takes (see below)")
    group.add_argument("--max-wait", type=float, metavar="SECONDS", help="how far ahead the start may be (default: 0)")
    group.add_argument(
        "--settle", type=float, metavar="SECONDS",
        help=f"how long Slurm may take to start a job that has room (default: {Patience.settle_s:g})",
    )  # fmt: skip
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job: time=2:00:00")
    group.add_argument("--dry-run", action="store_true", help="with --submit: test the choices, submit nothing")


@dataclass(frozen=True)
class JobOf:
    """Makes a choice a job: a template with the user's values, and the choice's own."""

    template: Template
    values: Mapping[str, str]
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __call__(self, choice: Choice) -> Request:
        """Raises UsageError for values that the template does not take."""
        launched = any("resilio-launch" in line and not line.startswith("#") for line in self.template.text.split("\n"))
        values = {**self._shape(choice), **self.values}
        command = list(self.command)
        if launched:
            command = launch_command(choice, command)
            values |= self._settings(choice)
        elif self.template.takes_command:
            command = list(filled(command, choice))
        job = render(self.template, values, command, submission.launcher_directory(self.environment))
        if launched:
            check(self.template, job, command, self.environment, Path.cwd())
        own = submission.own_environment(self.environment)
        return Request(job.script, job.arguments, own | choice.environment())

    def _settings(self, choice: Choice) -> dict[str, str]:
        """Ranks of each node; and spare nodes beside those of the choice, whose layout needs them all."""
        defaults = {setting.key: setting.default or "" for setting in self.template.settings}
        shape, found = choice.offer.shape, dict[str, str]()
        if "ranks_per_node" in defaults:
            found["ranks_per_node"] = str(shape.ranks_per_node)
        if "spares" in defaults:
            spares = self.values.get("spares") or self.environment.get("SPARES") or defaults["spares"]
            found["spares"] = spares
            found["nodes"] = str(shape.nodes + (int(spares) if spares.isdecimal() else 0))
        return found

    def _shape(self, choice: Choice) -> dict[str, str]:
        """Where the script asks for GPUs by --gres, its number of GPUs is replaced there."""
        options = choice.sbatch_options()
        kinds = self.template.options.get("gres", "").split(",")
        if any(kind.split(":")[0] == "gpu" for kind in kinds):
            others = [kind for kind in kinds if kind.split(":")[0] != "gpu"]
            options["gres"] = ",".join([f"gpu:{options.pop('gpus_per_node')}", *others])
        return options


def filled(command: Sequence[str], choice: Choice) -> tuple[str, ...]:
    """The command with {tp} … filled in. Raises UsageError. Pure."""
    layout, shape = choice.layout, choice.offer.shape
    more = ("cp", "ep", "vpp", "zero", "micro_batch", "global_batch")
    values = values_of(Layout(layout.tp, layout.pp, layout.dp * layout.cp), shape.nodes, shape.ranks_per_node)
    values |= {name: str(getattr(layout, name)) for name in more}
    values |= {"accumulation": str(layout.micro_batches), "recompute": layout.recompute.name.lower()}
    return fill(command, values)


def job_of(script: str, words: Sequence[str], command: Sequence[str], environment: Mapping[str, str]) -> JobOf:
    """What ``--submit SCRIPT --set … -- COMMAND`` means. Raises UsageError."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {word}: it is not of the form KEY=VALUE")
        gpus = normalised(key) == "gres" and any(kind.split(":")[0] == "gpu" for kind in value.split(","))
        if normalised(key) in _OF_THE_CHOICE or gpus:
            raise UsageError(f"--set {word}: {normalised(key)} is chosen by the planner; restrict the search instead")
        values[normalised(key)] = value
    if script.endswith(".py"):
        template, command = template_files.load("multi-node"), [script, *command]
    elif script in template_files.names():
        template = template_files.load(script)
    else:
        template = template_files.read(Path(script).expanduser(), Path(script).stem)
    _check_export(template, environment)
    return JobOf(template, values, tuple(command), environment)


def _check_export(template: Template, environment: Mapping[str, str]) -> None:
    """The layout travels in the environment, which a job may be told not to have."""
    written = _EXPORT.search(template.text)
    for where, value in (
        (f"{template.name}: #SBATCH --export", written[1] if written else "ALL"),
        ("SBATCH_EXPORT", environment.get("SBATCH_EXPORT", "ALL")),
    ):
        if "ALL" not in value.split(","):
            raise UsageError(f"{where}={value}: RESILIO_TP … would not reach the job; add ALL, or leave it out")


def check_options(options: argparse.Namespace) -> None:
    """What is wrong with them whatever the search finds. Raises UsageError."""
    if options.submit is None:
        for name in ("max_wait", "settle", "set", "dry_run"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} goes with --submit SCRIPT")
        return
    if options.emit:
        raise UsageError("one of --submit and --emit, not both")
    patience_of(options)


def patience_of(options: argparse.Namespace) -> Patience:
    """Raises UsageError."""
    given = {f"{name}_s": getattr(options, name) for name in ("max_wait", "settle")}
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"--{name[:-2].replace('_', '-')} {value:g}: seconds, 0 or more")
    return Patience(**{name: value for name, value in given.items() if value is not None})


def submit(choices: Sequence[Choice], options: argparse.Namespace, command: Sequence[str]) -> int:
    """Submit the first of ``choices``, best first, that Slurm takes; the exit code. ``command``: behind ``--``."""
    prepare = job_of(options.submit, options.set, command, os.environ)
    patience = patience_of(options)
    taken = Evaluator(prepare, teller(options.json), Trials(), patience).run(choices, options.dry_run)
    if taken is None:
        why = f"Slurm could start none of the {len(choices)} choices"
        hint = "" if options.max_wait else " now (--max-wait SECONDS accepts a later start)"
        print(f"resilio: {why}{hint}", file=sys.stderr)
        return NONE_TAKEN
    return 0


def teller(as_json: bool) -> Callable[[Attempt], None]:
    """Prints each attempt as it happens: a line for people, or a line of JSON."""

    def tell(attempt: Attempt) -> None:
        if as_json:
            print(json.dumps({"v": 1, "time": round(time.time(), 3), **asdict(attempt)}), flush=True)
            return
        shape = f"{attempt.nodes} x {attempt.gpus_per_node}" + f" in {attempt.partition}" * bool(attempt.partition)
        event = attempt.event + f" as job {attempt.job}" * (attempt.event == "submitted")
        print(f"choice {attempt.rank}: {shape}, {attempt.layout}: {event}: {printable(attempt.why, 400)}", flush=True)

    return tell
