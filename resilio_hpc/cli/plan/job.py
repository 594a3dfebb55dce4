"""A choice of the planner as a job: a template with its shape and layout written in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.cli.common.submit_check import check
from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.config.rank_layout import RankLayout, fill, values_of
from resilio_hpc.slurm.submit import submission, template_files
from resilio_hpc.slurm.submit.template import FilledTemplate, Template, normalised, render
from resilio_hpc.slurm.submit.trial import SubmitRequest

LAUNCHER_FILLS = ("tp", "pp", "dp", "world_size", "nodes", "ranks_per_node")
_EXPORT = re.compile(r"^#SBATCH\b.*?\s--export[= ](\S+)", re.MULTILINE)
_OF_THE_CHOICE = ("nodes", "gpus", "gpus_per_node", "gpus_per_task", "partition", "ranks_per_node")


@dataclass(frozen=True)
class JobOf:
    """Turns a choice into a job: a template with the user's values, and the choice's own."""

    template: Template
    values: Mapping[str, str]
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __call__(self, choice: Choice) -> SubmitRequest:
        """Return the request, checked, for Slurm. Raises UsageError."""
        job, command = self.rendered(choice)
        if self._launches:
            check(self.template, job, command, self.environment, Path.cwd())
        own = submission.own_environment(self.environment)
        return SubmitRequest(job.script, job.arguments, own | choice.environment())

    @property
    def _launches(self) -> bool:
        return any("resilio-launch" in line and not line.startswith("#") for line in self.template.text.split("\n"))

    def rendered(self, choice: Choice, setup_lines: Sequence[str] = ()) -> tuple[FilledTemplate, list[str]]:
        """Return the job and its command. Raises UsageError for values that the template refuses."""
        values = {**self._shape(choice), **self.values}
        command = list(self.command)
        if self._launches:
            command = launch_command(choice, command)
            values |= self._settings(choice)
        elif self.template.takes_command:
            command = list(filled(command, choice))
        here = submission.launcher_directory(self.environment)
        return render(self.template, values, command, here, setup_lines=setup_lines), command

    def _settings(self, choice: Choice) -> dict[str, str]:
        """Return the ranks of each node; and spare nodes beside those of the choice, whose layout needs them all."""
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
        """Return the nodes and GPUs. Where the script asks for GPUs by --gres, its number is replaced there."""
        options = choice.sbatch_options()
        kinds = self.template.options.get("gres", "").split(",")
        if any(kind.split(":")[0] == "gpu" for kind in kinds):
            others = [kind for kind in kinds if kind.split(":")[0] != "gpu"]
            options["gres"] = ",".join([f"gpu:{options.pop('gpus_per_node')}", *others])
        return options


def filled(command: Sequence[str], choice: Choice) -> tuple[str, ...]:
    """Return the command with {tp} … filled in. Raises UsageError. Pure."""
    words, shape = choice.words(), choice.offer.shape
    degrees = RankLayout(choice.layout.tp, choice.layout.pp, int(words["dp"]))
    values = values_of(degrees, shape.nodes, shape.ranks_per_node)
    return fill(command, {**words, **values})


def job_of(script: str, words: Sequence[str], command: Sequence[str], environment: Mapping[str, str]) -> JobOf:
    """Return the JobOf of ``--submit SCRIPT --set … -- COMMAND``. Raises UsageError."""
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
    """Check that the job gets the environment, in which the layout travels."""
    written = _EXPORT.search(template.text)
    for where, value in (
        (f"{template.name}: #SBATCH --export", written[1] if written else "ALL"),
        ("SBATCH_EXPORT", environment.get("SBATCH_EXPORT", "ALL")),
    ):
        if "ALL" not in value.split(","):
            raise UsageError(f"{where}={value}: RESILIO_TP … would not reach the job; add ALL, or leave it out")


def launch_command(choice: Choice, command: Sequence[str]) -> list[str]:
    """Return resilio-launch's arguments: the layout, and the command with words in braces.

    The launcher fills in what a resize changes (``--fill-arguments``); the rest is filled in now.
    """
    words = choice.words()
    fixed = {name: word for name, word in words.items() if name not in LAUNCHER_FILLS}
    pattern = re.compile(r"(?<![{$])\{(" + "|".join(fixed) + r")\}(?!\})")
    argv = [pattern.sub(lambda match: fixed[match[1]], word) for word in command]
    later = any(f"{{{name}}}" in word for name in LAUNCHER_FILLS for word in argv)
    if later:
        fill(argv, dict.fromkeys(LAUNCHER_FILLS, "1"))  # a misspelt word is reported now
    return ["--layout", f"tp={words['tp']},pp={words['pp']}", *(["--fill-arguments"] if later else []), *argv]
