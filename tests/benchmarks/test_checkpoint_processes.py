"""The processes of a measurement: what they tell is heard, and nothing of them is left."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_methods import Place
from checkpoint_processes import RUN_ID, directories, run, slowest
from launched import marked
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S, until

BENCHMARKS = ROOT / "benchmarks"
LEFT = f"_left_by_test_{os.getpid()}"
# A method that leaves a process in a session of its own, which has shared memory mapped, and files.
LITTERING = f"""
import mmap, os, subprocess, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from checkpoint_processes import place, tell, tell_failures
tell_failures()
held = "import mmap, time; f = open('/dev/shm/%s', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); "
name = os.environ["{RUN_ID}"] + "{LEFT}"
helper = [sys.executable, "-c", held % name + "print('ready', flush=True); time.sleep(600)"]
helper = subprocess.Popen(helper, start_new_session=True, stdout=subprocess.PIPE)
helper.stdout.readline()
open(sys.argv[1] + "/left", "w").close()
here = place()
"""


Littering = Callable[..., object]


@pytest.fixture
def littering(tmp_path: Path) -> Littering:
    """Runs the method above with some more lines, and looks for what it left."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "tmp").mkdir()

    def act(rest: str, processes: int = 1, timeout_s: float = PATIENCE_S) -> object:
        script = tmp_path / "script.py"
        script.write_text(LITTERING + rest)
        told = run("ours", [str(script), "{directory}"], processes, tmp_path / "disk", timeout_s, tmp=tmp_path / "tmp")
        assert not_cleaned(tmp_path / "disk", tmp_path / "tmp") == []
        return told

    return act


def not_cleaned(*directories: Path) -> list[Path]:
    """Files, shared memory and processes that a measurement left."""
    files = [entry for directory in directories for entry in directory.iterdir()]
    memory = Path("/dev/shm").glob(f"*{LEFT}")
    return [*files, *memory, *(entry for entry in Path("/proc").iterdir() if LEFT.encode() in command(entry))]


def command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # gone meanwhile


def test_every_process_is_heard_and_nothing_is_left(littering: Littering) -> None:
    assert littering("tell([here.rank, here.world_size])", processes=2) == [[0, 2], [1, 2]]


def test_the_reason_of_a_failure_is_one_line(littering: Littering) -> None:
    assert littering("raise ValueError('first\\nno room for it')") == "ValueError: no room for it"


def test_a_process_that_dies_without_a_word_is_told_by_its_last_line(littering: Littering) -> None:
    rest = "print('about to die', flush=True); os.kill(os.getpid(), 9)"
    assert littering(rest) == "about to die"


def test_a_process_is_not_waited_for_when_the_other_has_failed(littering: Littering) -> None:
    rest = "import time\nif here.rank == 0: time.sleep(600)\nraise ValueError('rank 1 cannot')"
    assert littering(rest, processes=2) == "ValueError: rank 1 cannot"


def test_a_process_that_hangs_is_given_up(littering: Littering) -> None:
    assert littering("import time; time.sleep(600)", timeout_s=0.5) == "not done within 0.5 s"


def test_nothing_is_left_when_a_benchmark_is_terminated(tmp_path: Path) -> None:
    script, disk, tmp = tmp_path / "script.py", tmp_path / "disk", tmp_path / "tmp"
    for directory in (disk, tmp):
        directory.mkdir()
    script.write_text(LITTERING + "import time; time.sleep(600)")
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from checkpoint_processes import run
run("ours", [{str(script)!r}, "{{directory}}"], 1, pathlib.Path({str(disk)!r}), 600)
"""
    environment = {**os.environ, "TMPDIR": str(tmp)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as benchmark:
        until(lambda: list(disk.glob("*/left")), "the method runs", alive=lambda: benchmark.poll() is None)
        assert list(Path("/dev/shm").glob(f"*{LEFT}"))
        benchmark.terminate()
    assert benchmark.returncode == 143
    assert not_cleaned(disk, tmp) == []


def test_nothing_is_left_when_the_measurement_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), directories(tmp_path) as (scratch, directory):
        (directory / "state").write_text("")
        raise KeyboardInterrupt
    assert not scratch.exists()
    assert list(tmp_path.iterdir()) == []
    assert marked(str(scratch)) == []


def test_of_processes_that_saved_together_the_slowest_counts_and_every_wrong_tensor() -> None:
    first = {"blocked": [1.0, 5.0], "cold": [2.0], "wrong": [1]}
    second = {"blocked": [3.0, 4.0], "cold": [1.0], "wrong": [2]}
    assert slowest([first, second]) == {"blocked": [3.0, 5.0], "cold": [2.0], "wrong": [3]}
    assert slowest([first]) == first


def test_a_process_knows_its_place() -> None:
    assert Place.read({}) == Place(0, 1)
    assert Place.read({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2)
