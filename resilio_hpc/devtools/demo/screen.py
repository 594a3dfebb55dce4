"""Where the demo's lines go: the terminal, and where wanted a picture of it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from resilio_hpc.core import terminal

PICTURE_WIDTH = 110  # columns
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Screen:
    """Prints, and remembers for ``save_picture`` what it printed."""

    def __init__(self) -> None:
        self._terminal = terminal.console(highlight=False, soft_wrap=True)
        self._recorded = Console(
            highlight=False, record=True, file=io.StringIO(), width=PICTURE_WIDTH, force_terminal=True
        )

    def print(self, *objects: Any) -> None:
        """Print rich's renderables."""
        self._terminal.print(*objects)
        self._recorded.print(*objects)

    def save_picture(self, path: Path, title: str) -> None:
        """Everything printed so far as an SVG that loads nothing from elsewhere. Raises OSError."""
        path.write_text(_FONTS.sub("", self._recorded.export_svg(title=title)))
