"""``resilio runs``: my runs in a table that fits, the damaged ones as lines, for people and for programs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.cli.runs import age_text, table, unique_length
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.report.summary import RunSummary
from tests.support.requirements import need_root


def a_run(path: Path, job: str, verdict: str = "", age_s: float = 0.0) -> str:
    """A run directory as a launch makes it. Returns its id."""
    run = run_directory.open_run(path)
    made = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**made, "created": time.time() - age_s}))
    Ledger(path / "ledger", f"{job}-supervisor-main").append("launch", job=job, nodes=["n1"])
    if verdict:
        run_directory.write_verdict(path, job, {"verdict": verdict, "exit_code": int(verdict != "completed")})
    return run.run_id


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RESILIO_RUN_DIR", raising=False)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[list[str], str]:
    assert main.main(["runs", *words]) == code
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_my_runs_the_newest_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = a_run(here / "resilio-runs" / "7", "7", "completed", 8000.0)
    new = a_run(here / "resilio-runs" / "8", "8", age_s=60.0)
    bad = a_run(here / "other", "local-1-2", "not_enough_nodes", 300.0)
    lines, err = said(capsys)
    assert [line.split() for line in lines] == [
        ["id", "job", "state", "step", "goodput", "age", "directory"],
        [new, "8", "starting", "-", "-", "60s", "resilio-runs/8"],
        [bad, "local", "not", "enough", "…", "-", "-", "5m", "other"],
        [old, "7", "completed", "-", "-", "2h", "resilio-runs/7"],
    ]
    assert err == ""
    assert [line.split()[0] for line in said(capsys, "-n", "1")[0]] == ["id", new]
    assert [line.split()[0] for line in said(capsys, "resilio-runs/7")[0]] == ["id", old]


def test_for_programs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = a_run(here / "resilio-runs" / "7", "7", "completed")
    (here / "resilio-runs" / "8").mkdir()
    (here / "resilio-runs" / "8" / "run.json").write_text("{")
    assert main.main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert (run["run_id"], run["run_dir"], run["state"], run["verdict"]) == (
        run_id, str(here / "resilio-runs" / "7"), "ended", "completed",
    )  # fmt: skip
    assert [one["run_dir"] for one in found["unread"]] == [str(here / "resilio-runs" / "8")]


def test_what_cannot_be_read_is_a_line_and_the_rest_is_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = here / "resilio-runs"
    good = a_run(runs / "7", "7", "completed")
    for name, content in {
        "newer": '{"version": 99, "run_id": "aa"}', "torn": '{"version": 1, "ru', "empty": "", "list": "[1]",
        "no-id": '{"version": 1}', "hostile": '{"version": 1, "run_id": "\\u001b[31m"}',
    }.items():  # fmt: skip
        (runs / name).mkdir()
        (runs / name / "run.json").write_text(content)
    a_run(runs / "\x1b[2Jname", "9", "completed")
    a_run(runs / "pipe", "10")
    (runs / "pipe" / "verdict.json").unlink(missing_ok=True)
    os.mkfifo(runs / "pipe" / "verdict.json")
    a_run(runs / "linked", "11")
    (runs / "linked" / "status.json").symlink_to("/etc/passwd")
    half = runs / "half-made"
    (half / "ledger").mkdir(parents=True)
    (half / "secret").write_text("x")
    (runs / "not-a-run").mkdir()  # no line: nothing says that it ever was one
    (runs / "damaged-rest").mkdir()
    a_run(runs / "damaged-rest", "12")
    for name in ("status.json", "verdict.json", "chain.json"):
        (runs / "damaged-rest" / name).write_text('{"time": "x", "verdict": 7')
    (runs / "damaged-rest" / "ledger" / "torn.jsonl").write_bytes(b'\xff\x00{"time": 1')
    lines, _ = said(capsys)
    text = "\n".join(lines)
    assert "\x1b" not in text and "Traceback" not in text
    assert any(line.startswith(good) for line in lines)
    assert any(line.endswith("resilio-runs/?[2Jname") for line in lines)
    assert any(line.endswith("resilio-runs/damaged-rest") for line in lines)
    for name, why in {
        "newer": "was made by a newer resilio (format 99): update this one", "torn": "run.json is damaged",
        "empty": "run.json is damaged", "list": "run.json is damaged", "no-id": "run.json is damaged",
        "pipe": "is no regular file", "linked": "is a link", "half-made": "no run.json",
    }.items():  # fmt: skip
        assert any(line.startswith(f"not read: resilio-runs/{name}: ") and why in line for line in lines), (name, text)
    assert "not-a-run" not in text


def test_a_run_of_another_user_is_not_mine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_root()
    a_run(here / "resilio-runs" / "7", "7", "completed")
    theirs = here / "resilio-runs" / "8"
    a_run(theirs, "8")
    os.chown(theirs, 65534, 65534)
    lines, err = said(capsys)
    assert len(lines) == 2 and err == "resilio: 1 of other users are left out\n"


def test_there_is_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys) == ([], "resilio: no run in resilio-runs, .\n")
    assert said(capsys, "nowhere", code=2)[1] == "resilio: error: nowhere is not a directory\n"
    assert "'x' is not a number from 1 on" in said(capsys, "-n", "x", code=2)[1]


def summary(number: int, directory: str = "resilio-runs/4711", verdict: str = "not_enough_nodes") -> RunSummary:
    return RunSummary(
        Path(directory), f"0dbb{number:08x}", 0.0, "1234567", 3, "ended", verdict, 1, 123_456_789, 0.98765, False
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    runs = [summary(number, f"/scratch/{'very/' * 9}long/resilio-runs/{number}") for number in range(30)]
    lines = table(runs, 9e6, width)
    assert max(map(len, lines)) <= width
    shown = [line.split()[0] for line in lines[1:]]
    assert len(set(shown)) == 30 and all(run.run_id.startswith(one) for run, one in zip(runs, shown, strict=True))
    assert all(line.endswith(f"/{number}") for number, line in enumerate(lines[1:]))  # the end tells them apart
    assert f"≤{98.765:.{0 if width < 80 else 1}f}%" in lines[1] and "104d" in lines[1] and "123456789" in lines[1]


def test_with_room_nothing_is_cut() -> None:
    (head, line) = table([summary(1, verdict="completed")], 30.0, 80)
    assert head.split() == ["id", "job", "state", "step", "goodput", "age", "directory"]
    assert line == "0dbb00000001  1234567  completed  123456789   ≤98.8%  30s  resilio-runs/4711"


def test_ages_and_ids() -> None:
    ages = [age_text(seconds) for seconds in (-5.0, 0.0, 99.0, 119.0, 120.0, 7199.0, 7200.0, 172_799.0, 172_800.0)]
    assert ages == ["0s", "0s", "99s", "119s", "2m", "119m", "2h", "47h", "2d"]
    assert unique_length([]) == unique_length(["0dbb00000001"]) == 6
    assert unique_length(["0dbb00000001", "0dbb00000010", "0dbb00000001"]) == 11
