"""Minutes of faults of all kinds, one after the other, in a chain of jobs: nothing is lost, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.devtools.devcluster.spec import HOST_SERIES
from tests.support.requirements import need_shared_mounts, need_slurm

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
WORSE_THAN_IT_MAY_BE = 2  # goodput: the machine may be busy


@pytest.mark.slow
def test_five_minutes_of_faults_lose_and_leave_nothing(tmp_path: Path) -> None:
    need_slurm(HOST_SERIES)
    need_shared_mounts()
    place = tmp_path / "soak"
    argv = [sys.executable, str(SOAK), "--seconds", "240", "--mtbf", "15", "--job-minutes", "2", "--keep", str(place)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, WORSE_THAN_IT_MAY_BE), f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert (place / "soak.result").exists()
