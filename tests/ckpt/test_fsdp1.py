"""FSDP1 over real process groups: saved in one wrapping, restored in each other one, by as many processes or fewer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_every_wrapping_restores_what_every_other_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "ckpt" / "fsdp1_layouts.py"), str(tmp_path)],
        env=scrubbed(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
