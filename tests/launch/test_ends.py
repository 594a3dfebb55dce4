"""Real launches without torch: what ends ranks, what outlives them, and what they find on their standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.launch.rundir import node_directories
from resilio_hpc.launch.rundir.run_directory import read_run
from tests.support.environments import ROOT, scrubbed
from tests.support.waiting import PATIENCE_S, until

# Life 0: rank 1 fails, rank 0 hears SIGTERM. Life 1: rank 0 leaves a process of a session of its own, and ends well.
LIVES = """
import os, signal, subprocess, sys, time
from pathlib import Path

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
read, inspect = repr(sys.stdin.read()), os.environ.get("PYTHONINSPECT")
print("LIFE", life, "rank", rank, "reads", read, "inspect", inspect, flush=True)
def flush(*_):
    Path("flushed").write_text(f"{rank} {life}")
    sys.exit(0)
signal.signal(signal.SIGTERM, flush)
Path(f"ready{rank}").touch()
while not Path("ready0").exists():
    time.sleep(0.01)
if life == 0 and rank == 1:
    raise RuntimeError("first life")
if life == 0:
    time.sleep(1000)
if rank == 0:
    wait = "while [ ! -e go ]; do sleep 0.05; done; echo done > uploaded"
    subprocess.Popen(["sh", "-c", wait], start_new_session=True, stdin=subprocess.DEVNULL)
"""


def launch(
    folder: Path, *options: str, torch: tuple[str, ...] = ("--no-torch",), **how: object
) -> subprocess.CompletedProcess[str]:
    words = (
        sys.executable,
        "-c",
        "import sys; from resilio_hpc.cli.entry import resilio_launch; sys.exit(resilio_launch())",
    )
    return subprocess.run(
        [*words, "--run-dir", "run", *torch, *options], cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, **{"env": scrubbed(), **how},
    )  # fmt: skip


def test_survivors_hear_sigterm_each_life_reads_its_input_and_what_is_detached_runs_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIVES)
    done = launch(
        tmp_path, "--nproc-per-node", "2", "--stdin", "1", "--failure-grace", str(PATIENCE_S), "train.py",
        input="hello\n", env=scrubbed(PYTHONINSPECT="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "flushed").read_text() == "0 0"
    for life in (0, 1):
        assert f"LIFE {life} rank 0 reads '' inspect None" in done.stdout
        assert f"LIFE {life} rank 1 reads 'hello\\n' inspect None" in done.stdout
    assert "in 0." not in done.stderr and "until training went on" not in done.stderr  # nobody saw it train
    assert "leave 2 processes running" in done.stderr or "leave 1 process running" in done.stderr
    (tmp_path / "go").touch()
    assert until(lambda: (tmp_path / "uploaded").exists(), "the end of what was detached")
    run = read_run(tmp_path / "run")
    assert node_directories.found(run.run_id, os.uname().nodename.split(".")[0]) == (None, None)


def test_a_program_without_torch_runs_where_there_is_none(tmp_path: Path) -> None:
    """As if it was not installed: a finder refuses it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    (tmp_path / "train.py").write_text("import numpy, os; print('RAN', os.environ['RANK'], numpy.arange(3).sum())")
    path = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    done = launch(tmp_path, "--nproc-per-node", "2", "train.py", env=scrubbed(PYTHONPATH=path), torch=())
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RAN 0 3" in done.stdout and "RAN 1 3" in done.stdout
    assert "decision" not in done.stderr


@pytest.mark.parametrize(
    ("source", "why", "restarts"),
    [("import no_such_module", "No module named 'no_such_module'", 1), ("raise SystemExit(2)", "exit code 2", 1)],
)
def test_a_mistake_of_the_program_is_tried_once_more_and_named(
    tmp_path: Path, source: str, why: str, restarts: int
) -> None:
    (tmp_path / "train.py").write_text(source)
    done = launch(tmp_path, "--max-restarts", "5", "train.py")
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if "gave up" in line or "first failure" in line]
    assert "the same failure again" in last[0] and why in done.stderr
    assert "cost of failures: 1 restart" in done.stderr
    assert "begins anew" not in done.stderr and "recovered from" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_never_attached_may_end_before_the_one_that_reports_the_steps_of_all(
    tmp_path: Path, nodes: int
) -> None:
    (tmp_path / "train.py").write_text("""
import os, pathlib, time
from resilio_hpc import train
done = pathlib.Path("done")
if os.environ["RANK"] == "0":
    for step in train.attach().steps(0, 5):
        time.sleep(0.1)
    done.touch()
    time.sleep(4.0)  # it writes a report
while not done.exists():
    time.sleep(0.05)
time.sleep(1.0)
""")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch"),
            *("--nproc-per-node", str(2 // nodes), "--max-restarts", "0", "train.py"),
        ],
        cwd=tmp_path, env=scrubbed(RESILIO_LOCAL_NODES=str(nodes)), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
