"""Commands of ``resilio`` in a real pseudo-terminal of a given size: what a user's screen gets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.cells import cell_len

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

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


def typed(argv: list[str], awaited: bytes, then: bytes = b"", lines: int = 24, columns: int = 100) -> tuple[int, bytes]:
    """Run a command with a terminal; type ``then`` when ``awaited`` is seen. Returns (exit code, all that it wrote)."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "resilio_hpc.cli.main", *argv],
        stdin=child, stdout=child, stderr=child, env=scrubbed("COLUMNS", "LINES", TERM="xterm"), start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )  # fmt: skip
    os.close(child)
    seen = bytearray()

    def closed() -> bool:
        nonlocal then
        if not select.select([parent], [], [], 0.05)[0]:
            return False
        try:
            seen.extend(os.read(parent, 65536))
        except OSError:  # the terminal's other end is closed
            return True
        if then and awaited in seen:
            os.write(parent, then)
            then = b""
        return False

    until(closed, "the end of the command", lambda: bytes(seen[-500:]), poll_s=0)
    os.close(parent)
    return process.wait(PATIENCE_S), bytes(seen)


def too_long(lines: list[str], columns: int) -> list[str]:
    """Return the lines that a terminal of this width would break."""
    return [line for line in lines if cell_len(line) > columns]
