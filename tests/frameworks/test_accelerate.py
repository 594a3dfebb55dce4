"""Accelerate: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import ROOT, SUPPORT
from tests.support.frameworks.runs import FRAMEWORKS, VARIANTS, FrameworkRun
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_stateful_loaders_are_refused(tmp_path: Path) -> None:
    """With them, a run did not go on with the same bits."""
    for one in (FRAMEWORKS["accelerate"], VARIANTS["lightning-stateful"]):
        one.need()
    script = [str(SUPPORT / "frameworks" / "stateful.py"), *FRAMEWORKS["accelerate"].command]
    launch = FrameworkRun(tmp_path, 2, script, PYTHONPATH=str(ROOT)).start()
    said, _ = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode and "leave use_stateful_dataloader out" in said
