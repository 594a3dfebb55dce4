"""Programs that need torch, in processes of their own, with one import of torch for all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.environments import SUPPORT, scrubbed


def run_programs(programs: Sequence[tuple[Path, str]]) -> list[tuple[int, str]]:
    """Run each source in its directory, one after the other. Returns (exit code, what it printed) of each."""
    words = json.dumps([[str(directory), source] for directory, source in programs])
    argv = [sys.executable, str(SUPPORT / "train" / "forked_programs.py"), words]
    done = subprocess.run(argv, env=scrubbed(), stdout=subprocess.PIPE, text=True, check=True)
    return [(int(code), str(said)) for code, said in json.loads(done.stdout)]
