"""The parsers of all commands, for manual pages and completion: made by the commands themselves."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from resilio_hpc.cli.common.commands import COMMANDS, SUMMARY
from resilio_hpc.cli.common.parser import Parser, parser_of
from resilio_hpc.cli.plan import plan
from resilio_hpc.launch.cli.options_parser import build_parser

COMMAND = "COMMAND"


def launcher() -> argparse.ArgumentParser:
    """Return the parser of ``resilio-launch``."""
    return build_parser({})


def whole() -> argparse.ArgumentParser:
    """Return a parser of ``resilio`` below which are those of all its commands."""
    made = {command.name: (_parser_of(command.name, command.module), command.summary) for command in COMMANDS}
    return _joined("resilio", SUMMARY, made)


def _parser_of(name: str, module: str) -> argparse.ArgumentParser:
    if name == "launch":
        return launcher()
    if name == "plan":  # has no parser of its own, so that a command's module is imported only when it is asked for
        made = {verb: (_found(source), summary) for verb, (source, summary) in plan.COMMANDS.items()}
        return _joined("resilio plan", {one.name: one.summary for one in COMMANDS}["plan"], made)
    return _found(module)


def _found(module: str) -> argparse.ArgumentParser:
    return parser_of(importlib.import_module(module).main)


def _joined(
    prog: str, description: str, below: dict[str, tuple[argparse.ArgumentParser, str]]
) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description=description)
    ready: Any = _ready
    commands = parser.add_subparsers(metavar=COMMAND, parser_class=ready)
    for name, (made, summary) in below.items():
        commands.add_parser(name, help=summary, made=made)
    return parser


def _ready(made: argparse.ArgumentParser, **_settings: Any) -> argparse.ArgumentParser:
    """Return the parser that is there, where argparse would make one."""
    return made


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Return name, summary and parser of each command below a parser; none for one without."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {one.dest: one.help or "" for one in action._choices_actions}
            return [(name, summaries.get(name, ""), below) for name, below in action.choices.items()]
    return []


def spellings(action: argparse.Action) -> list[str]:
    """Return the names of an option, without those that only write underscores for hyphens. Pure."""
    return [name for name in action.option_strings if "_" not in name] or list(action.option_strings)
