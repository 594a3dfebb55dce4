"""The parser of commands, whose errors are one line."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake. With an epilog, all text is printed as written."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog"):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

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
