"""Completion of the command line in shells: scripts that need no Python when a key is pressed. shtab writes them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from resilio_hpc.cli.site import parsers
from resilio_hpc.core import extras

SHELLS = ("bash", "zsh", "fish")
# Where a shell looks for the script of a command, below PREFIX/share.
PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
_DIRECTORIES = ("DIR", "RUN", "PLACE")
_FILES = ("FILE", "PATH", "SCRIPT", "LOG", "CSV")


def scripts(shell: str) -> dict[str, str]:
    """Return the script of each command, by its name. Raises UsageError where shtab is not installed."""
    shtab = extras.library("shtab", "completion")
    made = {}
    for parser in (parsers.whole(), parsers.launcher()):
        _prepare(parser, shtab)
        # a name of its own: "resilio launch" and "resilio-launch" would make functions of one name
        made[parser.prog] = shtab.complete(parser, shell, root_prefix=parser.prog.replace("-", ""))
    return made


def _prepare(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Leave out what a person would not choose, and say which values are files."""
    for action in parser._actions:
        if action.option_strings:
            action.option_strings = parsers.spellings(action)
        elif action.help is argparse.SUPPRESS:  # the usage shows the program's own words, the options' help does not
            action.help = "a program and its arguments"
        kind = _kind_of_value(action)
        if kind:
            action.complete = {"file": shtab.FILE, "directory": shtab.DIRECTORY}[kind]  # type: ignore[attr-defined]
    for _, summary, below in parsers.commands_of(parser):
        below.description = summary
        _prepare(below, shtab)


def _kind_of_value(action: argparse.Action) -> str:
    """Return "file", "directory", or "" for a value that is neither, by its type and the word that stands for it."""
    if action.nargs == 0 or action.choices is not None:
        return ""
    word = str(action.metavar or action.dest).upper()
    if any(word.startswith(one) for one in _DIRECTORIES):
        return "directory"
    is_program = not action.option_strings and action.dest.startswith("training_script")
    return "file" if action.type is Path or is_program or any(one in word for one in _FILES) else ""
