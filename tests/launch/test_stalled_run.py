"""Under the real launcher: a rank is stopped (SIGSTOP) while its peer waits for it, and goes on after a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.core.terminal import plain
from resilio_hpc.launch.rundir import limit_files
from resilio_hpc.launch.rundir.limit_files import LimitOrder
from resilio_hpc.report.overview import RunReader
from resilio_hpc.report.screen import state_words
from resilio_hpc.watch.limit_table import LimitEntry
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

# ranks in lock step, by files: each waits until all have done the step before
SCRIPT = """
import os, time
from pathlib import Path
from resilio_hpc import train

run = train.attach()
for step in run.steps(0, 100000):
    Path(f"at.{run.rank}.new").write_text(str(step))
    os.replace(f"at.{run.rank}.new", f"at.{run.rank}")
    while not all(Path(f"at.{r}").exists() and int(Path(f"at.{r}").read_text()) >= step for r in range(run.world_size)):
        time.sleep(0.002)
    time.sleep(0.01)
    if Path("end").exists():
        break
"""


def events(run: Path, kind: str) -> list[Event]:
    return [event for event in read_ledger(run / "ledger") if event.kind == kind]


@pytest.mark.slow
def test_it_is_said_and_is_no_goodput(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    launch = subprocess.Popen(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch"),
            *("--nproc-per-node", "2", "--hang-timeout", "0", "train.py"),
        ],
        cwd=tmp_path, env=scrubbed(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: (tmp_path / "at.1").exists() and int((tmp_path / "at.1").read_text()) > 200, "200 steps")
        (ranks,) = events(run, "ranks")
        pid = ranks.fields["pids"]["1"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: bool(events(run, "stalled")), "the stall seen")
        until(lambda: state_words(RunReader(run).overview(time.time())).startswith("stalled "), "the status says so")
        os.kill(pid, signal.SIGCONT)
        until(lambda: bool(events(run, "goes_on")), "the next step seen")
        (tmp_path / "end").touch()
        _, said = launch.communicate(timeout=PATIENCE_S)
    finally:
        launch.terminate()
    stalled, again = events(run, "stalled")[-1], events(run, "goes_on")[-1]
    assert stalled.fields["step"] >= 100
    assert stalled.fields["limit_s"] >= 2.0
    assert again.fields["waited_s"] > stalled.fields["silent_s"]
    assert again.fields["step"] > stalled.fields["step"]
    assert "no step for" in plain(said)
    goodput = RunReader(run).overview(time.time()).goodput
    assert goodput.stalled_s > stalled.fields["silent_s"]
    assert goodput.useful_s <= goodput.total_s - goodput.stalled_s


ALONE = """
import time
from pathlib import Path
from resilio_hpc import train
run = train.attach()
for step in run.steps(0, 100000):
    time.sleep(0.01)
    if Path("end").exists():
        run.finish(step + 1)
        break
"""


@pytest.mark.slow
def test_a_limit_that_is_set_is_taken_by_the_running_controller(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    argv = [
        *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch"),
        *("--nproc-per-node", "1", "train.py"),
    ]
    run = tmp_path / "run"

    def limits() -> dict[str, LimitEntry]:
        return {entry.name: entry for entry in limit_files.read_kept(run).limits} if run.exists() else {}

    with subprocess.Popen(argv, cwd=tmp_path, env=scrubbed(), stderr=subprocess.DEVNULL) as launch:
        try:
            until(lambda: "step" in limits() and limits()["step"].source == "learned", "a limit learned")
            limit_files.write_order(run, LimitOrder({"step": 30.0}, by="me", time=time.time()))
            until(lambda: limits()["step"].source == "set", "the order taken")
            (tmp_path / "end").touch()
            assert launch.wait(PATIENCE_S) == 0
        finally:
            launch.terminate()
    assert limits()["step"].limit_s == 30.0
    (told,) = events(run, "limits_set")
    assert told.fields["limits"] == {"step": 30.0}


EARLY = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(6):
    if first and step == 3 and dist.get_rank() == 1:
        if os.fork() == 0:  # it holds the connections, as a GPU's memory holds what NCCL waits for
            time.sleep(1000)
        os._exit(0)
    dist.all_reduce(torch.ones(10))
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_ends_while_its_peers_wait_for_it_has_left_early(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(EARLY)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run"),
            *("--nproc-per-node", "2", "train.py"),
        ],
        cwd=tmp_path, env=scrubbed(RESILIO_LOCAL_NODES="2"), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (failed,) = events(tmp_path / "run", "rank_failed")
    assert (failed.fields["kind"], failed.fields["rank"]) == ("early_exit", 1)
    assert "rank 1 exited with 0 and did not enter all_reduce number 4 of the gloo group" in done.stderr
    assert done.stdout.count("done") == 4
