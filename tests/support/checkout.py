"""A copy of what the project's repository holds, without anything that was built in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S


def copy_of_checkout(to: Path) -> Path:
    """Copy the tracked files but tests and docs, as they are now; return the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)
    return to
