"""--mode and --notify from end to end: two local nodes, one rank of which fails."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.rundir.run_directory import read_verdict
from tests.support.environments import scrubbed
from tests.support.launch.webhook_server import Server
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import os, sys, time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

run = train.attach()
state = {"w": np.zeros(4)}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
start, _ = checkpoint.restore(state) or (0, None)
print("begins at", start, flush=True)
committed = os.path.join(os.environ["RESILIO_RUN_DIR_OF_TEST"], "checkpoints", "latest")
for step in run.steps(start, int(sys.argv[1]), save=lambda done: checkpoint.save(done, state), every=5):
    if sys.argv[2] != "never" and step >= 10 and run.round == 0:
        while sys.argv[2] == "after a commit" and not os.path.lexists(committed):  # nobody runs ahead of the others
            time.sleep(0.01)
        if run.rank == 1:
            sys.exit(7)
    time.sleep(0.02)
"""
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--run-dir", "run")


def environment(folder: Path) -> dict[str, str]:
    return scrubbed(RESILIO_LOCAL_NODES="2", no_proxy="127.0.0.1", RESILIO_RUN_DIR_OF_TEST=folder / "run")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [*LAUNCH, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=PATIENCE_S
    )


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in read_ledger(folder / "run" / "ledger") if event.kind == kind]


def verdict(folder: Path) -> tuple[str, int]:
    said = read_verdict(folder / "run") or {}
    return str(said.get("verdict")), int(said.get("exit_code", -1))


def test_observe_writes_down_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "--mode=observe", "train.py", "1000", "at once")
    assert done.returncode == 7, done.stderr
    assert verdict(tmp_path) == ("failed", 7)
    (decision,) = entries(tmp_path, "decision")
    assert (decision["rung"], decision["acted"]) == ("restart_ranks", False)
    assert len(entries(tmp_path, "round")) == 1
    assert entries(tmp_path, "committed") == []
    assert "failed: with --mode observe a failure ends the run; --mode recover would restart the ranks" in done.stderr
    assert "first failure: rank 1 (local rank 0) on local1" in done.stderr


@pytest.mark.slow
def test_checkpoint_saves_and_restores_but_restarts_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "--mode=checkpoint", "train.py", "1000", "after a commit")
    assert done.returncode == 7, done.stderr
    assert verdict(tmp_path) == ("failed", 7)
    assert len(entries(tmp_path, "round")) == 1
    committed = max(entry["step"] for entry in entries(tmp_path, "committed"))
    assert committed >= 5

    observed = launch(tmp_path, "--mode=observe", "train.py", "20", "never")
    assert observed.stdout.count("begins at 0") == 2, "observe restores nothing"
    (tmp_path / "run" / "verdict.json").unlink()  # the run counts as complete now
    again = launch(tmp_path, "--mode=checkpoint", "train.py", str(committed + 5), "never")
    assert again.returncode == 0, again.stderr
    (begun,) = set(re.findall(r"begins at (\d+)", again.stdout))
    assert int(begun) >= committed, "a later step may have become durable while the run ended"
    assert again.stdout.count(f"begins at {begun}") == 2
    assert verdict(tmp_path) == ("completed", 0)


@pytest.mark.slow
def test_observe_passes_sigterm_on_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*LAUNCH, "--mode=observe", "--stop-grace=1", "train.py", "100000", "never"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until(lambda: entries(tmp_path, "first_step"), "a step", alive=lambda: process.poll() is None, poll_s=0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 143, said
    assert verdict(tmp_path) == ("terminated", 143)
    assert entries(tmp_path, "stop_agreed") == [] and entries(tmp_path, "committed") == []


@pytest.fixture
def server() -> Server:
    return Server(200)


def test_a_recovered_failure_is_told_to_all_targets_and_their_secrets_to_nobody(tmp_path: Path, server: Server) -> None:
    told = tmp_path / "told"
    (tmp_path / "targets").write_text(f"# who is told\n{server.url}\n")
    command = f"sh -c 'echo $RESILIO_EVENT >> {told}' SECRET"
    done = launch(tmp_path, "--notify", "@targets", "--notify", command, "train.py", "40", "at once")
    server.close()
    assert done.returncode == 0, done.stderr
    messages = [message for _, message in server.received]
    assert messages[-1]["event"] == "verdict" and messages[-1]["verdict"] == "completed"
    texts = "\n".join(message["text"] for message in messages)
    assert "rank 1 on local1" in texts and "recovered from" in texts
    assert told.read_text().splitlines()[-1] == "verdict"
    (launched,) = entries(tmp_path, "launch")
    assert "<command sh>" in launched["argv"]
    for path in [file for file in (tmp_path / "run").rglob("*") if file.is_file() and file.name != "notify"]:
        assert b"SECRET" not in path.read_bytes(), path
    assert "SECRET" not in done.stderr + done.stdout


def test_the_dry_run_shows_targets_without_secrets(tmp_path: Path) -> None:
    done = launch(tmp_path, "--dry-run", "--notify", "https://h.example/SECRET", "train.py")
    assert "notified        webhook https://h.example\n" in done.stdout
    assert "SECRET" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
