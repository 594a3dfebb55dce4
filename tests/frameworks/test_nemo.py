"""NVIDIA NeMo's models under the callback for Lightning. NeMo needs an older Lightning: an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.environments import SUPPORT
from tests.support.frameworks.runs import FrameworkRun

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("RESILIO_TEST_NEMO", "")
EPOCH = 16


@pytest.mark.skipif(not PYTHON, reason="RESILIO_TEST_NEMO names no python that has NeMo (docs/testing.md)")
def test_a_model_of_nemo_loses_no_finished_step(tmp_path: Path) -> None:
    command = [str(SUPPORT / "frameworks" / "nemo_model.py"), "3"]
    whole, killed, stopped = (
        FrameworkRun(tmp_path / name, 2, command, python=Path(PYTHON)) for name in ("whole", "killed", "stopped")
    )
    whole.launch()
    killed.launch(str(EPOCH + 5), "1", "kill")
    assert killed.restored() == [-1, EPOCH + 5]
    stopped.stop_and_go_on(11)
    assert killed.end == stopped.end == whole.end
