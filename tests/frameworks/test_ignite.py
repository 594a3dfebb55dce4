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


def alone(path: Path, case: str, *last: str) -> str:
    """Train in one process. Returns what it printed."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(
        [PYTHON, str(SUPPORT / "frameworks" / "ignite_cases.py"), case, *last], cwd=path, text=True, check=False,
        env=scrubbed(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"), timeout=PATIENCE_S, capture_output=True,
    )  # fmt: skip
    assert done.returncode == (1 if last else 0), done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("last", ["2", "3", "5", "6", "7"])
@pytest.mark.parametrize(
    "case",
    [
        "shuffled", "iterations", "epochs that are longer than the data", "epochs that are shorter than the data",
        "a worker", "a worker, other epochs", "an unknown length", "a list", "no data", "epochs that are ended",
    ],
)  # fmt: skip
def test_unusual_runs_see_what_an_undisturbed_one_does(tmp_path: Path, case: str, last: str) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    end = alone(whole, case)
    alone(ended, case, last)
    assert alone(ended, case) == end
    seen = (ended / "seen").read_text().splitlines()
    del seen[int(last)]  # the iteration that did not end
    assert seen == (whole / "seen").read_text().splitlines()
    assert alone(ended, case) == end  # it is complete
