"""``resilio checkpoint`` with the real launcher: ranks of two nodes save at the same step, and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt.store.checkpoint_index import committed_steps
from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import pathlib, time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run = train.attach()
checkpoint, state = Checkpointer(run.checkpoint_dir), {"x": np.zeros(1000)}
assert checkpoint.restore(state) is None
for step in run.steps(0, 1_000_000, save=checkpoint.saver(state)):
    state["x"] += 1
    time.sleep(0.01)
    if pathlib.Path("enough").exists():
        run.step_done(step + 1)
        run.finish(step + 1)
        break
"""


def checkpoint(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "checkpoint", str(run), *words]
    return subprocess.run(argv, capture_output=True, text=True, env=scrubbed(), timeout=PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ["--run-dir", "run", "--nproc-per-node", "1", "--no-torch", "train.py"]
    with (tmp_path / "log").open("wb") as log:
        launched = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv], cwd=tmp_path,
            env=scrubbed(RESILIO_LOCAL_NODES="2"), stdout=log, stderr=log,
        )  # fmt: skip
    ledger = tmp_path / "run" / "ledger"
    until(
        lambda: ledger.is_dir() and any(event.kind == "first_step" for event in read_ledger(ledger)),
        "the first step", lambda: (tmp_path / "log").read_text(), alive=lambda: launched.poll() is None,
    )  # fmt: skip
    yield tmp_path / "run"
    (tmp_path / "enough").touch()
    assert launched.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_an_order_is_committed_and_training_goes_on(run: Path) -> None:
    done = checkpoint(run)
    assert done.returncode == 0, done.stderr
    ordered, made = done.stdout.splitlines()
    assert "orders a checkpoint; the ranks are at step" in ordered
    step = int(made.partition(": step ")[2].partition(",")[0])
    assert committed_steps(run / "checkpoints")[-1] == step
    again = checkpoint(run, "--json")
    assert json.loads(again.stdout)["step"] > step
    assert checkpoint(run, "--no-wait").stdout.startswith("ordered;")


def test_a_run_that_has_ended_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "run.json").write_text("{}")
    for kind in ("launch", "launch_ends"):
        with (tmp_path / "ledger" / "1.jsonl").open("a") as file:
            file.write(json.dumps({"v": 1, "time": 1.0, "writer": "1", "event": kind}) + "\n")
    done = checkpoint(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not run now: its last job has ended" in done.stderr
    assert not (tmp_path / "links").exists()
