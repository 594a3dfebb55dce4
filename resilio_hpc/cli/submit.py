"""``resilio submit``: a ready job script, with values and a command filled in, passed to sbatch."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.node_faults.exclusion import Exclusion
from resilio_hpc.slurm.runs import run_names
from resilio_hpc.slurm.submit import new_job, sbatch_options, submission, template_files, template_settings
from resilio_hpc.slurm.submit.template import FilledTemplate, Template, normalised, render

_EXAMPLES = """\
examples:
  resilio submit --list
  resilio submit --explain chained
  resilio submit --template multi-node nodes=4 time=12:00:00 -- train.py --config large.yaml
  resilio submit --template chained nodes=9 spares=1 --dry-run -- train.py          # prints the script
  resilio submit --template chained nodes=9 -- --max-restarts 5 train.py            # flags of resilio-launch
  resilio submit --template ./my-site.sbatch partition=gpu -- train.py              # your own copy of a template

exit codes:
  0 submitted (or printed); 1 Slurm refused the job, or did not answer; 2 a mistake in the command line
"""


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (--?([\w-]+).*)", message)
        if unknown and "=" in unknown[1]:
            raise UsageError(f"{unknown[1].split()[0]}: write {unknown[1].split()[0].lstrip('-')}, without dashes")
        raise UsageError(f"{message} (see: resilio submit --help)")


@dataclass(frozen=True)
class Receipt:
    """A submitted job, and how to watch and stop it."""

    job: str
    template: str
    run_dir: str
    output: str
    watch: tuple[str, ...]
    stop: str


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code: 0 when the job is in the queue."""
    words, command = _split(argv)
    options = _parser().parse_args(words)
    if options.list:
        return _list(options.json)
    if options.explain:
        return _explain(template_files.load(options.explain), options.json)
    if not options.template:
        raise UsageError(f"--template NAME: the templates are {', '.join(template_files.names())}")
    template = template_files.load(options.template)
    values = _values(options.values)
    here, others = submission.launcher_directory(os.environ), _others(template, values)
    plain = render(template, values, command, here, others)
    if template.name == "joiner" and not options.no_check:
        values = _joined(values)
        plain = render(template, values, command, here, others)
    if not options.no_check:
        from resilio_hpc.cli.common import submit_check

        submit_check.check(template, plain, command, os.environ, Path.cwd())
        if not options.dry_run:
            submit_check.check_fits(plain.options, set(map(normalised, values)), CommandClient())
    avoids = Exclusion() if options.any_node else new_job.avoided(plain, os.environ, Path.cwd(), CommandClient())

    def excluding(nodes: str) -> FilledTemplate:
        return render(template, _replaced(values, exclude=nodes), command, here, others)

    job = excluding(new_job.excluded(plain, avoids)) if avoids.nodes else plain
    if avoids.why:
        said = f"{compress(avoids.nodes)} avoided (--any-node: not)" if avoids.nodes else "note"
        _note(f"{said}: {printable(avoids.why, 600)}")
    if options.dry_run:
        print(_as_json({"script": job.script, "arguments": job.arguments}) if options.json else job.script.rstrip("\n"))
        return 0
    done = new_job.submit(plain, avoids, excluding, submission.own_environment(os.environ), _note)
    receipt = _receipt(template, job, done.job, Path.cwd())
    if done.said:
        print(done.said, file=sys.stderr)
    print(_as_json(asdict(receipt)) if options.json else _words(receipt), flush=True)
    return 0


def _note(text: str) -> None:
    print(f"resilio: {text}", file=sys.stderr)


def _replaced(values: Mapping[str, str], **new: str) -> dict[str, str]:
    return {key: value for key, value in values.items() if normalised(key) not in new} | new


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own words, and the command behind ``--``."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="resilio submit",
        usage="resilio submit --template NAME [KEY=VALUE …] [--dry-run] [--json] -- COMMAND …\n"
        "       resilio submit --list | --explain NAME [--json]",
        description="Submits a job from a ready script. COMMAND is what resilio-launch gets: [FLAGS] SCRIPT "
        "[ARGUMENTS …]. The script runs in the current directory.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument("--template", metavar="NAME", help="one of --list, or the path of a script")
    parser.add_argument("--list", action="store_true", help="the templates, each in one line")
    parser.add_argument("--explain", metavar="NAME", help="what a template is for, and its keys")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not look for the command and directories from here, nor whether the job can ever start",
    )
    parser.add_argument("--any-node", action="store_true", help="do not avoid nodes that failed your runs lately")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="values of the template's keys")
    return parser


def _values(words: Sequence[str]) -> dict[str, str]:
    """Return ``["nodes=4"]`` → ``{"nodes": "4"}``. Raises UsageError."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{word!r} is not of the form KEY=VALUE (a command goes behind --: … -- {word})")
        if normalised(key) in map(normalised, values):
            raise UsageError(f"{normalised(key)} is given twice")
        values[key] = value
    return values


def _joined(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a joiner with the path of its run, where that is named by a job or an id."""
    run = next((value for key, value in values.items() if normalised(key) == "run_dir"), "")
    if not run or "$" in run or "chdir" in map(normalised, values):
        return dict(values)
    path = run_names.run_path(run)
    return dict(values) if str(path) == run else _replaced(values, run_dir=str(path.absolute()))


def _others(template: Template, values: Mapping[str, str]) -> str:
    """Return the templates that have the first key which this one lacks."""
    unknown = [normalised(key) for key in values if normalised(key) not in template.keys]
    near = difflib.get_close_matches(unknown[0], template_settings.BY_KEY, 1, 0.7) if unknown else []
    if not near or (near[0] != unknown[0] and difflib.get_close_matches(unknown[0], template.keys, 1, 0.6)):
        return ""
    return f"{near[0]}, which {', '.join(template_files.having(near[0]))} have"


# -- what is said ----------------------------------------------------------------------------------------------------


def _receipt(template: Template, job: FilledTemplate, number: str, cwd: Path) -> Receipt:
    directory = cwd / job.options.get("chdir", ".")
    array = "array" in job.options
    output = str(directory / output_name(job.options.get("output", "slurm-%j.out"), job.options, number))
    run_dir = job.settings.get("run_dir", "resilio-runs/$SLURM_JOB_ID")
    run_dir = run_dir.replace("$SLURM_JOB_ID", number).replace("$SLURM_ARRAY_JOB_ID", number)
    run_dir = str(directory / Path(run_dir).expanduser()) if "$" not in run_dir else ""
    task = "/0" if array else ""
    watch = [f"squeue -j {number}", f"tail -F {shlex.quote(output)}"]
    watch += [f"resilio status {shlex.quote(run_dir + task)}"] if run_dir else []
    return Receipt(number, template.name, run_dir, output, tuple(watch), f"scancel {number}")


def output_name(pattern: str, options: Mapping[str, str], number: str) -> str:
    """Return sbatch's file name pattern, as far as it is known before the job runs. Pure."""
    known = {"%": "%", "j": number, "A": number, "a": "0", "x": options.get("job_name", "")}
    return re.sub(r"%([%jAax])", lambda found: known[found[1]], pattern)


def _words(receipt: Receipt) -> str:
    lines = [f"job {receipt.job} is in the queue (template {receipt.template})"]
    lines += [f"  watch   {line}" for line in receipt.watch]
    return "\n".join([*lines, f"  stop    {receipt.stop}"])


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2)


def _list(as_json: bool) -> int:
    templates = [template_files.load(name) for name in template_files.names()]
    if as_json:
        print(_as_json([_facts(template) for template in templates]))
        return 0
    width = max(len(template.name) for template in templates)
    for template in templates:
        print(f"{template.name:<{width}}  {template.summary}")
    print(
        f"\nresilio submit --explain NAME tells a template's keys; the files are in {template_files.FOLDER.resolve()}"
    )
    return 0


def _facts(template: Template) -> dict[str, object]:
    return {
        "name": template.name,
        "about": template.about,
        "takes_command": template.takes_command,
        "options": dict(template.options),
        "settings": [asdict(setting) for setting in template.settings],
    }


def _explain(template: Template, as_json: bool) -> int:
    if as_json:
        print(_as_json(_facts(template)))
        return 0
    settings = [(s.key, "required" if s.default is None else s.default, s.help) for s in template.settings]
    setup = [("setup", "", "a file of shell lines to be read first: modules, an environment")]
    own = [(key, value, sbatch_options.BY_KEY[key].help) for key, value in template.options.items()]
    more = [option.key for option in sbatch_options.OPTIONS if option.key not in template.options]
    print(template.about)
    print(f"\nsettings:\n{_table([*settings, *(setup if template.takes_setup else [])])}")
    print(f"\noptions of sbatch:\n{_table(own)}")
    print(f"\nand also: {', '.join(more)}")
    print("\ncommand: " + ("-- [FLAGS of resilio-launch] SCRIPT [ARGUMENTS …]" if template.takes_command else "none"))
    return 0


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {key:<{first}}  {value:<{second}}  {text}".rstrip() for key, value, text in rows)
