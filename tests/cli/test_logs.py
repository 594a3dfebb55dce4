"""``resilio logs`` and ``resilio why`` on a real run that its user's bug ended, and on logs that are still written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import Ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import glob, sys, time
from resilio_hpc.train import attach
run = attach()
print("rank", run.rank, "speaks in round", run.round, flush=True); open(f"spoke-{run.round}-{run.rank}", "w").close()
sys.stdout.write("10%\\r50%\\r\\x1b[31mred\\x1b[0m and \\x1b]0;title\\x07 all\\n")
for step in run.steps(0, 40):
    while step == 20 and run.rank == 1 and len(glob.glob(f"spoke-{run.round}-*")) < 4: time.sleep(0.01)
    if step == 20 and run.rank == 1:
        raise ValueError(f"a <b>bad</b> \\x1b[31msample in round {run.round}")
    time.sleep(0.01)
"""
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--nproc-per-node", "2",
          "--max-restarts", "1")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a launch that gave up."""
    folder = tmp_path_factory.mktemp("a real run")
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*LAUNCH, "--run-dir", str(folder / "run"), "train.py"], cwd=folder, env=scrubbed(RESILIO_LOCAL_NODES="2"),
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return folder / "run"


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main.main(argv) == code
    return capsys.readouterr().out


def test_why_it_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said(capsys, "why", str(run)).split())
    assert text.startswith("The run ended at step ") and "The same had happened 1 time before." in text
    assert "rank 1 on local0 ended with exit code 1 at train.py:10: ValueError: a <b>bad</b>" in text
    assert "It is an error of the program." in text and "To do: mend the program" in text
    found = json.loads(said(capsys, "why", str(run), "--json"))
    assert (found["v"], found["state"], found["broke"]["place"]) == (1, "ended", "train.py:10")
    assert found["verdict"]["verdict"] == "no_progress" and "\x1b" not in found["why"]


def test_the_first_error_in_one_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "logs", str(run), "--first-error")
    assert text.startswith("rank 1 (local rank 1) on local0 in round ")
    for words in ("exit code 1 at train.py:10", "Traceback (most recent call last):", "raise ValueError(f", "/1.log"):
        assert words in text
    assert "\x1b" not in text
    found = json.loads(said(capsys, "logs", str(run), "--first-error", "--json"))
    assert (found["rank"], found["node"], found["exit_code"], found["class"]) == (1, "local0", 1, "user_code")
    assert found["traceback"].startswith("Traceback") and Path(found["log"]).exists() and found["time"] > 1e9
    first = json.loads(said(capsys, "logs", str(run), "--first-error", "--json", "--round", "0"))
    assert first["round"] == 0 and first["message"].endswith("sample in round 0")


def test_the_output_of_all_ranks_and_of_some(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = said(capsys, "logs", str(run), "--round", "0")
    assert [f"== rank {rank} on local{rank // 2}, round 0" in every for rank in range(4)] == [True] * 4
    assert "10%" not in every and "\x1b" not in every and "\x07" not in every
    one = said(capsys, "logs", str(run), "--rank", "2", "--round", "0")
    assert one.startswith("rank 2 speaks in round 0\n") and "==" not in one
    of_node = said(capsys, "logs", str(run), "--node", "local1", "--round", "0", "-n", "1")
    assert [line for line in of_node.splitlines() if line.startswith("==")] == [
        "== rank 2 on local1, round 0", "== rank 3 on local1, round 0",
    ]  # fmt: skip
    assert said(capsys, "logs", str(run), "--rank", "0-1,3", "--round", "0").count("==") == 3


def test_following_a_run_that_ended_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "logs", str(run), "--follow", "--rank", "1")
    assert "[rank 1] rank 1 speaks in round" in text


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("--rank 9", 2, "it has ranks 0 to 3 on local0, local1"),
        ("--node gpu7", 2, "--node gpu7: round"),
        ("--round 77", 2, "the rounds are 0 to"),
        ("--rank 3-1", 2, "3 is more than 1"),
        ("--rank x", 2, "is no list of ranks"),
        ("--json", 2, "--json goes with --first-error"),
        ("--first-error --rank 1", 2, "finds the rank by itself"),
        ("--first-error --follow", 2, "not allowed with argument"),
        ("--first-error --round 77", 1, "no rank has failed in round 77"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], argv: str, code: int, words: str) -> None:
    assert main.main(["logs", str(run), *argv.split()]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def made(folder: Path) -> Path:
    """A run that is under way, with the output of 12 ranks."""
    (folder / "run.json").write_text('{"version": 1, "run_id": "abc", "created": 1.0}')
    for rank in range(12):
        log = folder / "logs" / "0" / f"n{rank // 4}" / f"{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"rank {rank} begins\n")
    Ledger(folder / "ledger", "7-supervisor-main").append("launch", job="7", nodes=["n0", "n1", "n2"])
    return folder


def test_of_many_ranks_one_is_shown_and_the_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["logs", str(made(tmp_path))]) == 0
    out, err = capsys.readouterr()
    assert out == "== rank 0 on n0, round 0\nrank 0 begins\n" and "11 more ranks have output in round 0" in err
    Ledger(tmp_path / "ledger", "7-n1").append("rank_failed", round=0, node="n1", rank=6, kind="exit", exit_code=1)
    assert said(capsys, "logs", str(tmp_path)).startswith("== rank 6 on n1, round 0\n")
    capsys.readouterr()
    (tmp_path / "logs" / "0" / "n0" / "0.part2.log").write_text("it goes on\n")
    (tmp_path / "logs" / "0" / "n0" / "0.err.log").write_text("an error")
    (tmp_path / "logs" / "0" / "n0" / "filtered_stdout.log").write_text("not a rank's")
    os.mkfifo(tmp_path / "logs" / "0" / "n0" / "3.err.log")  # would block a reader
    text = said(capsys, "logs", str(tmp_path), "--node", "n0")
    assert "it goes on" in text and "round 0, standard error\nan error\n" in text and "not a rank's" not in text


def test_a_log_that_cannot_be_read_is_said_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = made(tmp_path) / "logs" / "0" / "n0" / "1.log"
    log.unlink()
    log.symlink_to("/etc/passwd")
    text = said(capsys, "logs", str(tmp_path), "--node", "n0")
    assert "rank 2 begins" in text and "root:" not in text


def test_following_shows_lines_as_they_come_and_the_next_round(tmp_path: Path) -> None:
    run = made(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "resilio_hpc.cli.main", "logs", str(run), "--follow", "--rank", "5"],
        env=scrubbed(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(iter(process.stdout.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        until(lambda: "[rank 5] rank 5 begins\n" in seen, "the first line", lambda: seen)
        with (run / "logs" / "0" / "n1" / "5.log").open("a") as log:
            log.write("half ")
            log.flush()
            log.write("a line\n")
        until(lambda: "[rank 5] half a line\n" in seen, "the next line", lambda: seen)
        later = run / "logs" / "1" / "n1" / "5.log"
        later.parent.mkdir(parents=True)
        later.write_text("again\nwithout an end")
        until(lambda: "[rank 5] again\n" in seen, "the next round", lambda: seen)
        (run / "verdict.json").write_text(json.dumps({"verdict": "completed", "exit_code": 0, "time": 1e9, "job": "7"}))
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    assert seen[-2:] == ["[rank 5] again\n", "[rank 5] without an end\n"] and "== round 1\n" in seen
