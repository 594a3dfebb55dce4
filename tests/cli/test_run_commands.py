"""``resilio status``, ``ledger`` and ``view`` on a real run whose rank 1 was killed, and on what is no run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import Ledger, read_ledger
from resilio_hpc.report import faults, goodput
from tests.support.environments import scrubbed
from tests.support.pseudo_terminal import typed
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import os, signal, time
from resilio_hpc.train import attach
run = attach()
print("rank", run.rank, "speaks", flush=True)
for step in run.steps(0, 40):
    if step == 20 and run.rank == 1 and run.round == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
"""
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--view", "--nproc-per-node", "2")


def environment() -> dict[str, str]:
    return scrubbed("COLUMNS", "LINES", TERM="xterm")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """(run directory, how ``resilio-launch --view`` ended with its output in a pipe)."""
    folder = tmp_path_factory.mktemp("a real run")
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*LAUNCH, "--run-dir", str(folder / "run"), "train.py"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done


@pytest.fixture(scope="module")
def run(launched: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return launched[0]


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_a_launch_under_a_view_shows_the_run_and_not_the_ranks(
    launched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    path, done = launched
    assert "killed by SIGKILL" in done.stdout and "completed: every rank exited with 0" in done.stdout
    assert "speaks" not in done.stdout + done.stderr
    assert re.search(r"cost of failures: 1 restart, [\d.]+ s until training went on", done.stderr)
    assert "round 1: 2 ranks on" in (path / "console.log").read_text()
    assert "speaks" not in (path / "console.log").read_text()
    assert all("speaks" in log.read_text() for log in (path / "logs" / "1").rglob("*.log"))


def test_the_fault_and_the_goodput_of_a_real_run(run: Path) -> None:
    events = read_ledger(run / "ledger")
    (fault,) = faults(events)
    assert (fault.kind, fault.rank, fault.recovered, fault.plan) == ("rank_killed", 1, True, "restart_ranks")
    assert fault.recovery_s is not None and fault.detection_s is not None
    assert fault.recovery_s > 0 and 0 <= fault.detection_s < fault.recovery_s
    found = goodput(events)
    assert found.steps_known and found.rounds == 2
    assert 0 < found.useful_s < found.total_s and found.recovery_s > 0 and found.startup_s > 0
    parts = found.useful_s + found.redone_s + found.startup_s + found.recovery_s + found.closing_s
    assert parts == pytest.approx(found.total_s)


def test_status_of_a_run_that_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "status", str(run))
    assert any(line.startswith("state       ended: completed (every rank exited with 0)") for line in lines)
    assert any(
        re.search(r"killed rank +rank 1 on \S+ +[\d.]+ s +\d+ steps? +restart the ranks", line) for line in lines
    )
    assert all(line == line.rstrip() for line in lines)


def test_status_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", "--json", str(run)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["verdict"]["verdict"], found["faults"][0]["rank"]) == ("ended", "completed", 1)
    assert 0 < found["goodput"]["share"] < 1


def test_the_ledger_in_words_and_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = lines_of(capsys, "ledger", str(run))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", words[0])
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3}  rank_failed +rank 1 on \S+ killed by SIGKILL", "\n".join(words), re.M)
    raw = [json.loads(line) for line in lines_of(capsys, "ledger", "--json", str(run))]
    assert [(one["time"], one["event"]) for one in raw] == [(e.time, e.kind) for e in read_ledger(run / "ledger")]


def test_one_kind_of_event(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "ledger", str(run), "--event", "recovered", "--event", "verdict")
    assert [line.split()[1] for line in lines[1:]] == ["recovered", "verdict"]
    assert main.main(["ledger", str(run), "--event", "recoverd"]) == 2
    assert capsys.readouterr().err == (
        "resilio: error: --event: no event is named 'recoverd': did you mean recovered?\n"
    )


def test_following_ends_with_the_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "launch_ends" in lines_of(capsys, "ledger", "--follow", str(run))[-1]


def test_the_view_of_a_run_that_ended_ends_in_plain_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "view", str(run))
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines)
    assert "recovered from a killed rank" in "\n".join(lines)


def test_the_live_view_ends_by_itself_with_the_verdict_and_gives_the_cursor_back(run: Path) -> None:
    code, seen = typed(["view", str(run)], b"")
    assert code == 0 and b"ended: completed" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


def test_ctrl_c_leaves_a_live_view_with_the_cursor_shown_and_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run_id": "abc", "created": time.time()}))
    Ledger(tmp_path / "ledger", "7-supervisor-main").append("launch", job="7", nodes=["n1"])
    code, seen = typed(["view", str(tmp_path)], b"starting", b"\x03")
    assert code == 130 and b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


@pytest.mark.parametrize(
    ("keys", "seen"),
    [(b"n", b"role"), (b"e", b"job 7 starts"), (b"l", b"No rank has written"), (b"nex\x1b[A", b"n nodes   e events")],
)
def test_keys_of_a_live_view(tmp_path: Path, keys: bytes, seen: bytes) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run_id": "abc", "created": time.time()}))
    Ledger(tmp_path / "ledger", "7-supervisor-main").append("launch", job="7", nodes=["n1"])
    told = {"time": time.time(), "phase": "running", "members": [{"node": "n1"}], "agents": {"n1": {"step": 5}}}
    (tmp_path / "status.json").write_text(json.dumps(told))
    code, written = typed(["view", str(tmp_path)], b"q quit", keys + b"q")
    assert code == 0 and seen in written and b"Traceback" not in written
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")


@pytest.mark.parametrize("command", ["status", "ledger", "view"])
@pytest.mark.parametrize("name", ["nowhere", "empty", "\x1b[31mred"])
def test_what_is_no_run_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main.main([command, str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "\x1b" not in err
    assert err.startswith("resilio: error: ") and ("does not exist" in err or "no run.json" in err)
