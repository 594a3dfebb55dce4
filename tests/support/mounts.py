"""Small file systems in memory: disks that fill up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import need_mounts

LIMIT_S = 60.0


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with ``options`` (``size=10m``) on ``directory``, which is made; skip without that right."""
    need_mounts()
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    subprocess.run(mount, check=True, timeout=LIMIT_S)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=LIMIT_S)
