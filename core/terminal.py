"""Text for a terminal: no control characters, whatever a file, Slurm or another user's job has put into it.

Commands write through ``guarded``: every line goes through ``printable``. Code that draws on the terminal itself
(colours, bars, tables) writes to ``raw``, and makes each text from outside printable first.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from resilio_hpc.core.json_fields import printable

if TYPE_CHECKING:
    from rich.console import Console


def plain(text: str) -> str:
    """Return ``text`` with its lines and tabs, without other control characters. Pure."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(printable(part, len(part)) for part in line.split("\t")) for line in text.split("\n"))


class Guarded:
    """A text stream that writes plain text; all other calls go to the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, made plain."""
        self.stream.write(plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Make plain, for the block, what is written to standard output and standard error."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if not isinstance(stream, Guarded) and stream is not None:
                stack.enter_context(redirect(Guarded(stream)))
        yield


def raw(stream: TextIO) -> TextIO:
    """Return the stream itself, for code that draws on a terminal."""
    return stream.stream if isinstance(stream, Guarded) else stream


def console(stream: TextIO | None = None, **options: Any) -> Console:
    """Return a rich console on ``stream``, by default standard output. Texts from outside must be printable before."""
    from rich.console import Console

    return Console(file=raw(stream or sys.stdout), **options)


def columns(otherwise: int) -> int:
    """Return the width of the terminal on standard output; ``otherwise`` where it is a file or a pipe."""
    try:
        return shutil.get_terminal_size().columns if raw(sys.stdout).isatty() else otherwise
    except ValueError:  # closed
        return otherwise


def wrapped(line: str, width: int) -> list[str]:
    """Return a line in pieces that fit; later ones are indented by two more. Words stay whole where they can. Pure."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [line]


def show(line: str) -> None:
    """Print a line of prose: in pieces that fit the terminal, whole to files and pipes."""
    width = columns(0)
    print("\n".join(wrapped(line, width) if width else [line]))


def local_time(unix: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return Unix seconds as local time, for people; a number outside of any calendar is an unknown time."""
    try:
        return time.strftime(form, time.localtime(unix if unix is not None else float("nan")))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
