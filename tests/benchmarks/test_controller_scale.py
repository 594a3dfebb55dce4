"""The benchmark of the controller still fits the controller: a few agents, one trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARK = ROOT / "benchmarks" / "controller_scale.py"


@pytest.mark.slow
def test_a_round_is_formed_and_a_new_controller_takes_over(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    argv = [sys.executable, str(BENCHMARK), "--agents", "8", "--repeats", "1", "--json", str(figures)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = json.loads(figures.read_text())["8"]
    assert 0 < trial["formed_s"] < trial["running_s"]
    assert 0 < trial["takeover_s"] < trial["restarted_s"]
