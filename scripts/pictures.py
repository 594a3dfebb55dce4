#!/usr/bin/env python3
"""Make the pictures of docs/ from real commands and runs: pictures.py [plan] [view] [demo]; all without a word.

view and demo are of one run of the demo, which takes some minutes (as root on a Slurm cluster of its own).
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.devtools.picture import WIDTH, Picture

DOCS = Path(__file__).parents[1] / "docs"
RESILIO = Path(sys.prefix) / "bin" / "resilio"
PLAN = ("plan", "gpt3-175b", "--gpus", "256-1024", "--gpu", "a100", "--global-batch", "1536", "--top", "5")
LARGEST_BYTES = 60_000
KINDS = ("plan", "view", "demo")


def main(kinds: list[str]) -> int:
    """Make the pictures. Exit code 0; 1 where a command failed or a picture is too large."""
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise UsageError(f"{wrong[0]}: the pictures are {', '.join(KINDS)}")
    kinds = kinds or list(KINDS)
    if "plan" in kinds:
        picture = Picture()
        picture.print_written(written(PLAN))
        picture.save(DOCS / "plan.svg", f"resilio {' '.join(PLAN)}")
    if "view" in kinds or "demo" in kinds:
        options = [f"--view-picture={DOCS / 'view.svg'}"] if "view" in kinds else []
        options += [f"--picture={DOCS / 'demo.svg'}"] if "demo" in kinds else []
        subprocess.run([DOCS.parent / "scripts" / "demo.sh", *options], check=True)
    sizes = {f"docs/{kind}.svg": (DOCS / f"{kind}.svg").stat().st_size for kind in kinds}
    for name, size in sizes.items():
        print(f"{name}: {size:,} bytes")
    return int(max(sizes.values()) > LARGEST_BYTES)


def written(words: tuple[str, ...]) -> str:
    """Return what ``resilio WORDS`` writes to a terminal of the picture's width, with its colours."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen([RESILIO, *words], stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    seen = bytearray()
    try:
        while data := os.read(parent, 65536):
            seen += data
    except OSError:  # the terminal's other end is closed
        pass
    os.close(parent)
    if process.wait() != 0:
        raise CommandError([str(RESILIO), *words], process.returncode, seen.decode(errors="replace"))
    return seen.decode().replace("\r\n", "\n").rstrip()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"pictures: error: {error}")
