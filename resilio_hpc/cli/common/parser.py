"""The parser of commands, whose errors are one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from resilio_hpc.core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake. With an epilog, all text is printed as written."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog"):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")
