"""A trial leaves no process and no file behind, whatever its launcher started."""

import mmap
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

from launched import Launched, launched, marked, shared_memory
from launchers import Launcher
from tests.support.waiting import PATIENCE_S

# A launcher whose ranks are in sessions of their own, so that no process group holds them.
SCATTERING = """
import subprocess, sys, time
rank = "import time; stamps = open('steps-rank%d', 'w'); print('1 1.0 0', file=stamps, flush=True); time.sleep(3600)"
for index in range(2):
    subprocess.Popen([sys.executable, "-c", rank % index], start_new_session=True)
time.sleep(3600)
"""


@pytest.fixture
def scattering(tmp_path: Path) -> Launcher:
    program = tmp_path / "launcher"
    program.write_text(f"#!{sys.executable}\n{SCATTERING}")
    program.chmod(0o700)
    return Launcher("scattering", "", program)


def wait_for_ranks(run: Launched) -> None:
    assert run.wait_for(lambda: all(run.stamps()), limit_s=PATIENCE_S), run.last_output()


def test_nothing_of_a_trial_is_left(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 2, tmp_path / "script", ()) as run:
        wait_for_ranks(run)
        assert len(marked(str(run.directory))) == 3
    assert marked(str(run.directory)) == []
    assert not run.directory.exists()


def test_one_rank_is_killed_and_nobody_else(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 2, tmp_path / "script", ()) as run:
        wait_for_ranks(run)
        run.kill_a_rank(random.Random(0))
        assert run.wait_for(lambda: len(marked(str(run.directory))) == 2, limit_s=PATIENCE_S)


def test_a_process_outside_the_trial_is_not_taken_for_a_rank(scattering: Launcher, tmp_path: Path) -> None:
    with launched(scattering, 2, tmp_path / "script", ()) as run:
        wait_for_ranks(run)
        for rank in range(2):
            (run.directory / f"steps-rank{rank}").rename(run.directory / f"old{rank}")
            (run.directory / f"steps-rank{rank}").touch()
        own = (run.directory / "steps-rank0").open()
        with own, pytest.raises(RuntimeError, match="no process of this trial is rank"):
            run.kill_a_rank(random.Random(0))


def test_shared_memory_that_a_trial_left_is_found() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, (Path(directory) / "slot").open("w+b") as slot:
        slot.truncate(4096)
        with mmap.mmap(slot.fileno(), 4096):
            assert Path(directory) in shared_memory([os.getpid()])
        assert Path(directory) not in shared_memory([os.getpid()])
