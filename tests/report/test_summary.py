"""A run in one line, from its ledger or from what its launch kept of it; and many runs, some of which hang."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.report import summary
from resilio_hpc.report.overview import RunReader
from resilio_hpc.report.run_list import MOST_HUNG, READERS, UnreadRun, summaries
from resilio_hpc.report.summary import RunSummary, summarise


def record(run: Path, writer: str, kind: str, at: float, **fields: object) -> None:
    ledger = Ledger(run / "ledger", writer, clock=lambda: at)
    ledger.append(kind, **fields)
    ledger.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "7"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": "0dbbcdbf63de", "created": 90.0}))
    record(path, "7-supervisor-main", "launch", 100.0, job="7", nodes=["n1"])
    record(path, "7-n1", "round", 101.0, round=0, members=["n1"])
    record(path, "7-n1", "first_step", 110.0, round=0, step=1, restored=-1)
    record(path, "7-n1", "committed", 150.0, step=40)
    record(path, "7-n1", "verdict", 200.0, verdict="completed", committed=50)
    record(path, "7-supervisor-main", "launch_ends", 200.0, verdict="completed", exit_code=0)
    verdict = {"v": 1, "time": 200.0, "job": "7", "verdict": "completed", "exit_code": 0, "reason": "", "committed": 50}
    (path / "verdict.json").write_text(json.dumps(verdict))
    return path


def test_it_is_what_status_says(run: Path) -> None:
    found, overview = summarise(run, 300.0), RunReader(run).overview(300.0)
    assert found == RunSummary(run, "0dbbcdbf63de", 90.0, "7", 1, "ended", "completed", 0, 40, found.goodput, True)
    assert found.goodput == overview.goodput.share == pytest.approx(0.9)
    assert (found.state, found.job, found.run_id) == (overview.state, overview.job, overview.run_id)


def test_what_was_kept_stands_for_the_ledger_until_that_grows(run: Path) -> None:
    before = summarise(run, 300.0)
    summary.keep(run)
    kept = json.loads((run / summary.FILE).read_text())
    (run / summary.FILE).write_text(json.dumps({**kept, "goodput": {**kept["goodput"], "useful_s": 50.0}}))
    assert summarise(run, 300.0) == replace(before, goodput=0.5)  # the ledger was not read
    record(run, "8-supervisor-main", "launch", 250.0, job="8", nodes=["n1"])
    after = summarise(run, 260.0)
    assert (after.state, after.job, after.jobs, after.verdict) == ("starting", "8", 2, "")
    assert after.goodput == pytest.approx(0.9)


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"v": 1}', '{"v": 9, "sizes": {}, "facts": {}, "goodput": {}}', "\0"]
)
def test_a_kept_summary_that_is_damaged_is_not_believed(damage: str, run: Path) -> None:
    before = summarise(run, 300.0)
    (run / summary.FILE).write_text(damage)
    assert summarise(run, 300.0) == before
    (run / summary.FILE).unlink()
    summary.keep(run)
    (run / summary.FILE).chmod(0o666)  # another user may have written it
    assert summarise(run, 300.0) == before


# -- many --------------------------------------------------------------------------------------------------------------


def test_runs_that_hang_are_lines_and_the_others_are_read(run: Path) -> None:
    paths = [run, *(Path(f"/hung/{number}") for number in range(READERS + 3)), run, Path("/nowhere")]
    never = threading.Event()

    def read(path: Path, now: float) -> RunSummary:
        if path.parent == Path("/hung"):
            never.wait()
        return summarise(path, now)

    found = summaries(paths, 300.0, 0.2, read)
    assert [one.path for one in found] == paths
    assert found[0] == found[-2] == summarise(run, 300.0)
    assert all(one == UnreadRun(one.path, "it was not read within 0.2 s") for one in found[1:-2])
    assert isinstance(found[-1], UnreadRun) and "does not exist" in found[-1].problem
    never.set()


def test_a_file_system_on_which_everything_hangs_is_given_up() -> None:
    never = threading.Event()

    def read(path: Path, now: float) -> RunSummary:
        never.wait()
        raise UsageError("it was woken")

    found = summaries([Path(f"/hung/{number}") for number in range(5 * MOST_HUNG)], 300.0, 0.05, read)
    problems = [one.problem for one in found if isinstance(one, UnreadRun)]
    assert len(problems) == 5 * MOST_HUNG
    assert problems[-1] == "it was not read: too many others do not answer"
    never.set()


def test_there_are_none() -> None:
    assert summaries([], 0.0) == []
