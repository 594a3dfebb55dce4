"""PyTorch-Ignite: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.environments import SUPPORT, scrubbed
from tests.support.frameworks.runs import FRAMEWORKS, PYTHON, FrameworkRun
from tests.support.waiting import PATIENCE_S

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


@pytest.mark.parametrize(
    "case",
    [
        "shuffled", "iterations", "epochs that are longer than the data", "epochs that are shorter than the data",
        "a worker", "a worker, other epochs", "an unknown length", "a list", "no data", "epochs that are ended",
    ],
)  # fmt: skip
def test_unusual_runs_see_what_an_undisturbed_one_does(tmp_path: Path, case: str) -> None:
    iterations = ("2", "3", "5", "6", "7")
    argv = [PYTHON, str(SUPPORT / "frameworks" / "ignite_cases.py"), case, *iterations]
    environment = scrubbed(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = (tmp_path / "whole" / "seen").read_text().splitlines()
    (end,) = (tmp_path / "whole" / "ended").read_text().splitlines()
    for iteration in iterations:
        seen = (tmp_path / iteration / "seen").read_text().splitlines()
        del seen[int(iteration)]  # of the step that did not end
        assert seen == whole
        assert (tmp_path / iteration / "ended").read_text().splitlines() == [end, end]  # the last one was complete
