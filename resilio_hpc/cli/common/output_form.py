"""What a command with much to show writes: lines for a terminal, JSON for programs, or a page in a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from resilio_hpc.core import terminal
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


def add(parser: argparse._ActionsContainer, json_help: str) -> None:
    """Add ``--html FILE`` and ``--json``, of which one may be given."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, in one file")
    form.add_argument("--json", action="store_true", help=json_help)


def check(options: argparse.Namespace) -> None:
    """Raise UsageError where no file can be made: before the work, which may be long."""
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html {printable(str(options.html), 500)} is a directory: name a file in it")


def show(
    options: argparse.Namespace, what: str, as_json: Callable[[], str], page: Callable[[], str],
    lines: Callable[[int], Sequence[str]],
) -> None:  # fmt: skip
    """Write it in the form that was asked for. ``what``: its name; ``lines``: for a width in columns."""
    if options.json:
        print(as_json(), file=terminal.raw(sys.stdout), flush=True)
    elif options.html is not None:
        write_atomic(options.html, page().encode(), durable=False)
        print(f"{what} is in {printable(str(options.html), 500)}", flush=True)
    else:
        print("\n".join(lines(min(terminal.columns(80), 100))), flush=True)
