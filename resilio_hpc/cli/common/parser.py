"""The parser of commands, whose errors are one line, and which can be had without running the command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

_IS_ASKED_FOR: ContextVar[bool] = ContextVar("_IS_ASKED_FOR", default=False)


class ParserFound(BaseException):
    """Ends a command where it would read its command line; ``parser`` is what it would have read it with."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake. With an epilog, all text is printed as written."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog"):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read a command line, as argparse does, unless the parser itself is asked for."""
        if _IS_ASKED_FOR.get():
            raise ParserFound(self)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is no choice, with the nearest one. Overrides argparse's own."""
        if action.choices is None or value in action.choices:
            return
        words = list(map(str, action.choices))
        near = difflib.get_close_matches(str(value), words, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        said = f"{printable(repr(value), 60)} is not known: {hint}known are {', '.join(words)}"
        raise argparse.ArgumentError(action, said)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def parser_of(main: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """Return the parser that a command makes, for its manual page and for completion. Nothing else of it runs.

    Raises LookupError where the command reads its words without one.
    """
    asked = _IS_ASKED_FOR.set(True)
    try:
        main([])
    except ParserFound as found:
        return found.parser
    finally:
        _IS_ASKED_FOR.reset(asked)
    raise LookupError(f"{main.__module__} has no parser")
