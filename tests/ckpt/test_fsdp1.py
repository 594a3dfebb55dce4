"""FSDP1 over real process groups: saved in one wrapping, restored in each other one, by as many processes or fewer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resilio_hpc.core.process import run
from tests.support.environments import SUPPORT
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_every_wrapping_restores_what_every_other_saved(tmp_path: Path) -> None:
    done = run([sys.executable, str(SUPPORT / "ckpt" / "fsdp1_layouts.py"), str(tmp_path)], PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
