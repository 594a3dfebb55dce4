"""Command line → LaunchOptions. Pure: environment, directory and clock are passed in; nothing is looked up."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import resilio_hpc
from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.help_text import DESCRIPTION, EXAMPLES, USAGE
from resilio_hpc.launch.cli.option_table import FLAGS, GROUPS
from resilio_hpc.launch.cli.option_values import Caller, check_numbers, interpret, local_nodes_of
from resilio_hpc.launch.config.flags import Flag
from resilio_hpc.launch.config.options import DEFAULT_JOIN_TIMEOUT_S, LaunchOptions


@dataclass(frozen=True)
class Parsed:
    """The options, and lines that are worth telling once (flags without effect)."""

    options: LaunchOptions
    notes: tuple[str, ...] = ()
    run_dir_given: bool = False


@dataclass(frozen=True)
class JoinRequest:
    """``--join``; all other options come from the run. ``run``: the word that names it."""

    run: str
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    local_nodes: int = 0
    dry_run: bool = False
    json: bool = False


WITH_JOIN = frozenset({"join", "join_timeout", "dry_run", "json"})


class _NothingToRun(UsageError):
    pass


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError with one line instead of printing its usage and exiting."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags that a word may abbreviate.

        argparse asks for the script's own flags too, which may begin like several of the launcher's: those are not
        ambiguous, and one before the script is an unknown flag.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            raise _NothingToRun("no script given: resilio-launch [FLAGS] SCRIPT [ARGUMENTS]; see resilio-launch --help")
        found = re.match(r"argument (\S+): (.*)", message, re.DOTALL)
        if not found:
            raise UsageError(message)
        name = next((n for n in found[1].split("/") if n.startswith("--")), found[1])
        raise UsageError(f"{name}: {found[2].replace('expected one argument', 'needs a value')}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows the hyphen spelling only."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name]
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(shown) + value if shown else super()._format_action_invocation(action)


class _Given(argparse.Action):
    """Stores a value, and that the flag was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        namespace.given = {*namespace.given, self.dest}


class _Repeated(_Given):
    """Collects the values of a flag that may be given several times."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        super().__call__(parser, namespace, (*getattr(namespace, self.dest), values), option_string)


def _spellings(flag: Flag) -> list[str]:
    names = list(flag.names)
    underscored = ["--" + name[2:].replace("-", "_") for name in names if name.startswith("--")]
    return names + [name for name in underscored if name not in names]


def build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser.

    Its namespace has torchrun's names and raw values, and ``given``, the flags that were given.
    """
    parser = _Parser(
        prog="resilio-launch",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"resilio-launch {resilio_hpc.__version__}")
    from_environment: set[str] = set()
    for title, flags in GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            default = flag.default
            text = environment.get(f"PET_{flag.dest.upper()}") if flag.pet else None
            if text is not None:
                default = _from_environment(flag, text)
                if default != flag.default:
                    from_environment.add(flag.dest)
            extra: dict[str, Any] = {"nargs": 0} if flag.type is None else {"type": flag.type, "metavar": flag.metavar}
            group.add_argument(
                *_spellings(flag),
                dest=flag.dest,
                action=_Repeated if flag.repeatable else _Given,
                default=default,
                choices=flag.choices,
                help=flag.help,
                **extra,
            )
    parser.add_argument("training_script", help=argparse.SUPPRESS)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(given=frozenset(from_environment))
    return parser


def _from_environment(flag: Flag, text: str) -> Any:
    """Return the value of a PET_ variable, as torchrun reads it: a switch is 0 or 1."""
    name = f"PET_{flag.dest.upper()}"
    if flag.type is None:
        if not re.fullmatch(r"\s*\d+\s*", text):
            raise UsageError(f"{name}={text!r} in the environment: write 1 or 0")
        return bool(int(text))
    try:
        value = flag.type(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name} in the environment: {error}") from None
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{name}={text!r} in the environment: choose from {', '.join(flag.choices)}")
    return value


def parse(argv: Sequence[str], caller: Caller) -> Parsed:
    """Read a command line. Raises UsageError; SystemExit(0) after ``--help`` and ``--version``."""
    for word in argv:
        if not word.isprintable() and any("\ud800" <= c <= "\udfff" for c in word):
            raise UsageError(f"argument {word!r} is not valid UTF-8")
    parser = build_parser(caller.environment)
    try:
        raw, unknown = parser.parse_known_args(list(argv))
    except _NothingToRun:
        unknown = [word for word in argv if word.startswith("-") and word != "--" and not _is_known(word)]
        if not unknown and len(argv) > 1 and argv[-1].endswith(".py") and argv[-2].startswith("-"):
            raise UsageError(f"no script given: {argv[-1]} was taken as the value of {argv[-2]}") from None
        if not unknown:
            raise
    if unknown:
        raise UsageError(_unknown_flag(unknown[0]))
    notes = tuple(
        f"{flag.names[-1]} has no effect: {flag.no_effect}"
        for flag in FLAGS
        if flag.no_effect and flag.dest in raw.given
    )
    options, more_notes = interpret(raw, caller)
    return Parsed(options, notes + more_notes, raw.run_dir is not None)


def parse_join(argv: Sequence[str], caller: Caller) -> JoinRequest | None:
    """Read a command line that asks to join a run; None for any other. Raises UsageError."""
    if not any(word.split("=", 1)[0] == "--join" for word in argv):
        return None
    parser = build_parser(caller.environment)
    script = True
    try:
        raw, unknown = parser.parse_known_args(list(argv))
    except _NothingToRun:
        script = False
        try:
            raw, unknown = parser.parse_known_args([*argv, "-"])
        except _NothingToRun:
            raise UsageError("--join: needs a value, the run") from None
    if raw.join is None:
        return None  # the script's own flag
    if unknown:
        raise UsageError(_unknown_flag(unknown[0]))
    if script:
        raise UsageError(f"--join takes no script, {raw.training_script!r} was given: the run says what is trained")
    others = sorted(raw.given - parser.get_default("given") - WITH_JOIN)
    if others:
        raise UsageError(f"--{others[0].replace('_', '-')} cannot be given with --join: the run's own options hold")
    if raw.json and not raw.dry_run:
        raise UsageError("--json belongs to --dry-run; a run's events are in RUN_DIR/ledger")
    if not raw.join.strip():
        raise UsageError("--join is empty: is the shell variable that should hold the run directory set?")
    check_numbers(raw)
    return JoinRequest(
        str(Path(raw.join).expanduser()),
        DEFAULT_JOIN_TIMEOUT_S if raw.join_timeout is None else raw.join_timeout,
        local_nodes_of(caller.environment), raw.dry_run, raw.json,
    )  # fmt: skip


def _is_known(word: str) -> bool:
    name = word.split("=", 1)[0]
    names = [spelling for flag in FLAGS for spelling in _spellings(flag)]
    if not name.startswith("--"):
        return name[:2] in names
    return any(spelling.startswith(name) for spelling in names)


def _unknown_flag(word: str) -> str:
    name = word.split("=", 1)[0]
    names = [spelling for flag in FLAGS for spelling in _spellings(flag)] + ["--help", "--version"]
    wanted = "--" + name.lstrip("-")
    names = [spelling for spelling in names if spelling.startswith("--") and ("_" in wanted or "_" not in spelling)]
    near = difflib.get_close_matches(wanted, names, 1, 0.64)
    near = near or [spelling for spelling in names if spelling[:7] == wanted[:7]]  # for --nprocs
    suggestion = f": did you mean {near[0]}?" if near else ""
    return f"unknown flag {name}{suggestion} (the script's own flags go after the script; see resilio-launch --help)"
