"""``resilio drill run --run`` with the real launcher: a run of two nodes on this machine is struck, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

run = train.attach()
checkpoint, state = Checkpointer(run.checkpoint_dir, layout=REPLICATED), {"x": np.zeros(1000)}
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 1_000_000, save=checkpoint.saver(state), every=10):
    state["x"] += 1
    time.sleep(0.02)
    if pathlib.Path("enough").exists():
        run.step_done(step + 1)
        run.finish(step + 1)
        break
"""


def resilio(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", *words]
    return subprocess.run(argv, capture_output=True, text=True, env=scrubbed(), cwd=where, timeout=2 * PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [
        "--run-dir",
        "run",
        "--nproc-per-node",
        "1",
        "--no-torch",
        "--preload",
        "numpy,resilio_hpc.ckpt",
        "train.py",
    ]
    with (tmp_path / "log").open("wb") as log:
        launched = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv], cwd=tmp_path,
            env=scrubbed(RESILIO_LOCAL_NODES="2"), stdout=log, stderr=log,
        )  # fmt: skip
    ledger = tmp_path / "run" / "ledger"
    until(
        lambda: ledger.is_dir() and any(event.kind == "committed" for event in read_ledger(ledger)),
        "the first commit", lambda: (tmp_path / "log").read_text(), alive=lambda: launched.poll() is None,
    )  # fmt: skip
    yield tmp_path / "run"
    (tmp_path / "enough").touch()
    if launched.poll() is None:
        launched.wait(PATIENCE_S)


def kinds(run: Path) -> list[str]:
    return [event.kind for event in read_ledger(run / "ledger")]


def test_a_killed_rank_is_recovered_and_told_as_a_drill(run: Path) -> None:
    where = run.parent
    planned = resilio(where, "drill", "run", "rank-sigkill", "--run", "run", "--dry-run")
    assert planned.returncode == 0 and "SIGKILL for rank" in planned.stdout, planned.stderr
    assert "drill" not in kinds(run)
    unanswered = resilio(where, "drill", "run", "rank-sigkill", "--run", "run")
    assert unanswered.returncode == 2 and "give --yes" in unanswered.stderr
    assert "drill" not in kinds(run)

    done = resilio(where, "drill", "run", "rank-sigkill", "--run", "run", "--yes", "--json", "--evidence", "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert record["passed"] and record["kind"] == "rank_killed" and record["recovery_s"] > 0.0
    assert record["repeated_steps"] is not None and record["went_on_to"] > 0
    why = json.loads(resilio(where, "why", "run", "--json").stdout)
    assert why["broke"]["drill"] == "kill_rank" and "made on purpose" in why["why"]
    lines = [json.loads(line) for line in (Path(record["evidence"]) / "ledger.jsonl").read_text().splitlines()]
    assert {"drill", "rank_failed", "recovered"} <= {line["event"] for line in lines}
    assert kinds(run).index("drill") < kinds(run).index("rank_failed")
    assert "restart_storm" not in resilio(where, "check", "run", "--no-action", "--restarts", "0").stdout


def test_a_killed_controller_is_recovered_by_another(run: Path) -> None:
    done = resilio(run.parent, "drill", "run", "controllers-agent-sigkill", "--run", "run", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["fault"] == "kill_controller" and record["passed"]
    assert len({event.fields["node"] for event in read_ledger(run / "ledger") if event.kind == "controller"}) == 2
    why = json.loads(resilio(run.parent, "why", "run", "--json").stdout)
    assert why["broke"]["drill"] == "kill_controller"


def test_a_run_that_has_ended_or_is_another_users_is_refused(run: Path) -> None:
    where = run.parent
    words = ("drill", "run", "rank-sigkill", "--run", "run", "--yes")
    if os.geteuid() == 0:
        os.chown(run, 12345, 12345)
        try:
            done = resilio(where, *words)
        finally:
            os.chown(run, 0, 0)
        assert done.returncode != 0 and "user" in done.stderr, done.stderr
        assert "drill" not in kinds(run)
    (where / "enough").touch()
    until(lambda: "launch_ends" in kinds(run), "the run's end", lambda: (where / "log").read_text())
    done = resilio(where, *words)
    assert done.returncode == 2 and "the run has ended (completed)" in done.stderr
    assert "drill" not in kinds(run)
