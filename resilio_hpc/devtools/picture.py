"""Pictures of a terminal's text, in its colours, for pages: SVG that loads no other files."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH = 96  # columns: at the 830 pixels of a page the letters are 14 pixels high
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_LETTER = 12.2  # pixels of a column in rich's pictures
_INDENTED = re.compile(r'x="([\d.]+)" (y="[\d.]+") textLength="([\d.]+)"([^>]*)>((?:&#160;)+)(?=[^<])')
_NUMBER = re.compile(r"terminal-\d+-")


class Picture:
    """What was printed on it, as an SVG."""

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self._console = Console(
            highlight=False, record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor"
        )

    def print(self, *objects: Any) -> None:
        """Print rich's renderables."""
        self._console.print(*objects)

    def print_written(self, text: str) -> None:
        """Print what a command wrote to a terminal of this width, with its colours."""
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def save(self, path: Path, title: str) -> None:
        """Save all as an SVG that loads no other files. Raises OSError."""
        drawn = _FONTS.sub("", self._console.export_svg(title=title, clear=False))
        path.write_text(_NUMBER.sub("terminal-", _INDENTED.sub(_moved, drawn)))


def _moved(found: re.Match[str]) -> str:
    """Return a text that begins where its first letter is: not every program keeps spaces at the beginning."""
    by = found[5].count(";") * _LETTER
    return f'x="{float(found[1]) + by:g}" {found[2]} textLength="{float(found[3]) - by:g}"{found[4]}>'
