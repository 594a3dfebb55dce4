"""Under the real launcher: a rank whose training is done does not end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import time
from resilio_hpc import train

run = train.attach()
for step in run.steps(0, 3):
    pass
if run.rank == 1:
    time.sleep(130)  # a library that hangs while it is torn down; then the machine's owner ends it
"""


@pytest.mark.slow
def test_it_is_told_after_two_minutes_and_the_run_still_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run"),
            *("--nproc-per-node", "2", "--max-restarts", "0", "train.py"),
        ],
        cwd=tmp_path,
        env=scrubbed(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stderr.splitlines() if "has not ended" in line]
    assert len(said) == 1 and "rank 1 on" in said[0] and "finished 2 min 00 s ago" in said[0]
