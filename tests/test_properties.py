"""The properties that the quick suite tries on the same examples every time, on others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environments import ROOT, scrubbed

MARKS = "hypothesis and not slow and not slurm"
LIMIT_S = 3600.0  # only a hang reaches it


@pytest.mark.slow
def test_all_properties_hold_for_examples_drawn_afresh() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, str(ROOT / "tests")]
    environment = scrubbed("PYTEST", RESILIO_TEST_EXAMPLES="search")
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
