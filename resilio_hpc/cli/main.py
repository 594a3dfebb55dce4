"""``resilio``: one entry for all commands; a command's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import resilio_hpc
from resilio_hpc.cli.common.commands import COMMANDS
from resilio_hpc.core import standard_streams
from resilio_hpc.core.errors import ResilioError, UsageError, os_error_text
from resilio_hpc.core.terminal import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code: the command's; 2 after a mistake of the user; 130 when interrupted."""
    if argv is None:
        standard_streams.make_usable()
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # --help in a locale without UTF-8
    with guarded():
        return _carry_out(words)


def _carry_out(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except ResilioError as error:
        print(f"resilio: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # resilio ledger | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:  # an unreadable file, a full disk, no descriptor left
        print(f"resilio: error: {os_error_text(error, 'this command')}", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    name, *rest = words
    if name in ("-h", "--help", "help"):
        print(_help(), flush=True)
        return 0
    if name in ("-V", "--version", "version"):
        print(f"resilio {resilio_hpc.__version__}")
        return 0
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise UsageError(_unknown(name))
    result = importlib.import_module(command.module).main(rest)
    return int(result or 0)


def _unknown(name: str) -> str:
    names = [command.name for command in COMMANDS]
    if name.endswith(".py"):
        return f"unknown command {name!r}: to run a script, resilio launch {name}"
    near = difflib.get_close_matches(name, names, 1, 0.5)
    if near:
        return f"unknown command {name!r}: did you mean {near[0]}?"
    return f"unknown command {name!r}: the commands are {', '.join(names)}"


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: resilio COMMAND …",
            "",
            *lines,
            "",
            "resilio COMMAND --help tells more; resilio --version the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
