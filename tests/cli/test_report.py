"""``resilio report`` on a real run: one job that a kill -9 of everything ended, and one in which a rank was killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import Event, read_ledger
from tests.support.environments import scrubbed
from tests.support.report.hostile_run import write_hostile_run
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import os, signal, time
from resilio_hpc.train import attach
run = attach()
for step in run.steps(0, 40):
    if step == 20 and run.rank == 1 and run.round == 1:
        raise ValueError("a <b>bad</b> sample")
    if os.environ.get("FOR_EVER") and step == 20:
        time.sleep(1000)
    time.sleep(0.01)
"""
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--nproc-per-node", "2")


def launch(folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LAUNCH, "--run-dir", str(folder / "run"), "train.py"], cwd=folder, env=scrubbed(**variables),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def events_of(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_ledger(folder / "run" / "ledger") if event.kind == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two launches."""
    folder = tmp_path_factory.mktemp("a real run")
    (folder / "train.py").write_text(SCRIPT)
    first = launch(folder, FOR_EVER="1")
    try:
        until(lambda: events_of(folder, "first_step"), "a first step")
    finally:
        pids = [event.fields["pid"] for event in events_of(folder, "agent")]
        for pid in (first.pid, *pids):
            with contextlib.suppress(ProcessLookupError):  # an agent ends with its launcher
                os.kill(pid, signal.SIGKILL)
        first.wait(PATIENCE_S)
    assert launch(folder).wait(PATIENCE_S) == 0
    return folder / "run"


def report(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    assert main.main(["report", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_time_of_both_jobs_is_accounted_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, run)
    assert (found["v"], found["state"], len(found["jobs"])) == (1, "ended", 2)
    assert sum(one["wall_us"] for one in found["by_cause"].values()) == found["wall_us"]
    assert sum(one["end_us"] - one["begin_us"] for one in found["spans"]) == found["wall_us"]
    spent = {cause for cause, one in found["by_cause"].items() if one["wall_us"]}
    assert {"start", "train", "detect", "recover", "unknown", "idle"} <= spent  # nothing says when the first job ended
    names = {line for span in found["spans"] for line in span["lines"]}
    for name in names:
        file, _, number = name.rpartition(":")
        line = (run / "ledger" / file).read_text().splitlines()[int(number) - 1]
        assert json.loads(line)["event"]


def test_it_agrees_with_status_and_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, run)
    assert main.main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["goodput"]["share"] == pytest.approx(found["goodput"], abs=1e-9)
    assert main.main(["runs", str(run.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["goodput"] == pytest.approx(found["goodput"], abs=1e-9)
    assert 0 < found["ettr"] <= found["goodput"] < 1


def test_what_broke_and_who_recovered_from_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = (one for one in report(capsys, run)["recoveries"] if one["kind"] == "rank_exception")
    assert (one["outcome"], one["rank"], one["lost_steps"] is not None) == ("automatic", 1, True)
    assert "a <b>bad</b> sample" in one["root"]
    assert one["place"].startswith("train.py:")


def test_lines_for_people_fit_a_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in (
        "goodput",
        "ETTR",
        "time by cause",
        "1 automatic",
        "ValueError: a <b>bad</b> sample",
        "what to change",
    ):
        assert words in re.sub(r"\s+", " ", text)


def test_the_page_is_one_whole_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a page.html"
    page.write_text("old")
    assert main.main(["report", str(run), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")
    assert "a &lt;b&gt;bad&lt;/b&gt; sample" in text and "<b>bad" not in text
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ("report /nowhere", 2, "/nowhere does not exist"),
        ("report {run} --html {run}", 2, "is a directory: name a file in it"),
        ("report {run} --html {run}/no/such/page.html", 1, "No such file or directory"),
        ("report {run} --html x --json", 2, "not allowed with argument"),
    ],
)
def test_mistakes_are_one_line(
    argv: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_hostile_run(tmp_path / "run")
    assert main.main(argv.format(run=run).split()) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("resilio: error: ")


def test_a_run_that_has_only_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"version": 1, "run_id": "0dbbcdbf63de", "created": 90.0}')
    found = report(capsys, tmp_path / "run")
    assert (found["wall_us"], found["goodput"], found["ettr"], found["spans"]) == (0, None, None, [])
    assert main.main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert main.main(["report", str(tmp_path / "run")]) == 0
    assert "goodput  unknown" in capsys.readouterr().out
