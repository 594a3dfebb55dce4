"""A trial leaves no process and no file behind, whatever its launcher started."""

import random
import sys
from pathlib import Path

import pytest

from launched import is_marked, launched, running
from launchers import Launcher

# A launcher whose ranks are in sessions of their own, so that no process group holds them.
SCATTERING = """
import os, subprocess, sys, time
rank = "import os, time; open('steps-rank%d', 'w').write(f'1.0 step 1 {os.getpid()}\\n'); time.sleep(60)"
for index in range(2):
    subprocess.Popen([sys.executable, "-c", rank % index], start_new_session=True)
time.sleep(60)
"""


@pytest.fixture
def scattering(tmp_path: Path) -> Launcher:
    program = tmp_path / "launcher"
    program.write_text(f"#!{sys.executable}\n{SCATTERING}")
    program.chmod(0o700)
    return Launcher("scattering", "", program)


def test_nothing_of_a_trial_is_left(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 2, tmp_path / "script", ()) as run:
        assert run.wait_for(lambda: all(run.stamps()), limit_s=30)
        mark = str(run.directory)
        assert sum(is_marked(pid, mark) for pid in running()) == 3
    assert not any(is_marked(pid, mark) for pid in running())
    assert not run.directory.exists()


def test_a_rank_is_killed_and_nobody_else(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 2, tmp_path / "script", ()) as run:
        assert run.wait_for(lambda: all(run.stamps()), limit_s=30)
        run.kill_a_rank(random.Random(0))
        assert run.wait_for(lambda: sum(is_marked(pid, str(run.directory)) for pid in running()) == 2, limit_s=10)


def test_a_process_of_somebody_else_is_not_touched(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 1, tmp_path / "script", ()) as run:
        assert run.wait_for(lambda: all(run.stamps()), limit_s=30)
        (run.directory / "steps-rank0").write_text("1.0 step 1 1\n")
        with pytest.raises(RuntimeError, match="process 1 is not a rank"):
            run.kill_a_rank(random.Random(0))
