"""PyTorch-Ignite: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import SUPPORT
from tests.support.frameworks.runs import FRAMEWORKS, FrameworkRun

pytestmark = pytest.mark.slow

EPOCH = 16


@pytest.fixture(scope="module", autouse=True)
def ignite() -> None:
    FRAMEWORKS["ignite"].need()


def test_an_unmodified_script_goes_on_from_its_own_newest_file(tmp_path: Path) -> None:
    command = [str(SUPPORT / "frameworks" / "ignite_plain.py"), "3"]
    whole, disturbed = (FrameworkRun(tmp_path / name, 2, command) for name in ("whole", "disturbed"))
    whole.launch()
    said = disturbed.launch(str(EPOCH + 5), "1", "kill")
    assert [line.split()[-1] for line in said.splitlines() if "BEGAN" in line] == ["0", "1"]
    assert disturbed.end == whole.end
