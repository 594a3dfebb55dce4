"""The parser of commands whose mistakes are one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from resilio_hpc.core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A mistake is a UsageError; where there is an epilog, all is printed as it is written."""

    def __init__(self, **settings: Any) -> None:
        if settings.get("epilog"):
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")
