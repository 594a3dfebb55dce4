"""Commands of ``resilio`` in a real pseudo-terminal of a given size: what a user's screen gets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.cells import cell_len

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(columns: int, *words: str, lines: int = 24, cwd: Path | None = None, expect: int = 0) -> list[str]:
    """Return what ``resilio WORDS`` writes to a terminal of this width, line by line, without colours."""
    return _ESCAPES.sub("", written(columns, *words, lines=lines, cwd=cwd, expect=expect)).splitlines()


def written(columns: int, *words: str, lines: int = 24, cwd: Path | None = None, expect: int = 0) -> str:
    """Return the same with its escape sequences."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**scrubbed(), "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)  # the terminal itself has a size
    process = subprocess.Popen(
        [sys.executable, "-m", "resilio_hpc.cli.main", *words], stdin=child, stdout=child, stderr=child, cwd=cwd,
        env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    seen = bytearray()
    try:
        while data := os.read(parent, 65536):
            seen += data
    except OSError:  # the terminal's other end is closed
        pass
    os.close(parent)
    assert process.wait(PATIENCE_S) == expect, bytes(seen)
    return seen.decode().replace("\r\n", "\n")


def too_long(lines: list[str], columns: int) -> list[str]:
    """Return the lines that a terminal of this width would break."""
    return [line for line in lines if cell_len(line) > columns]
