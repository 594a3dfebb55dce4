"""The benchmark of `resilio report`, at its smallest."""

from __future__ import annotations

import subprocess
import sys

from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S


def test_it_prints_a_row_for_each_size() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/report.py", "--nodes", "1,3", "--days", "1", "--faults", "20", "--repeats", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [int(row[1]) for row in rows] == [1, 3]
    assert all(int(row[2]) > 5 and "MB" in row[5] for row in rows)
