"""``resilio top``: many runs on a terminal, at little cost; once without one; keys, hostile names, a vanished place."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.report.run_list import summaries
from resilio_hpc.report.summary import RunSummary, keep, summarise
from resilio_hpc.report.watched_runs import WatchedRuns
from tests.support.pseudo_terminal import typed
from tests.support.report.hostile_run import write_hostile_run


def a_run(folder: Path, name: str, ended: bool = False, ago_s: float = 0.0) -> Path:
    run, now = folder / name, time.time()
    (run / "ledger").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"version": 1, "run_id": name * 3, "created": now - ago_s - 60}))
    ledger = Ledger(run / "ledger", "7-supervisor-main", lambda: now - ago_s - 50)
    ledger.append("launch", job="7", nodes=["n1"])
    ledger.append("round", time=now - ago_s - 45, round=0, members=["n1"], world_size=1)
    ledger.append("first_step", time=now - ago_s - 40, round=0, step=1, restored=-1)
    if ended:
        verdict = {"verdict": "completed", "exit_code": 0, "time": now - ago_s, "job": "7"}
        ledger.append("verdict", **verdict)
        ledger.append("launch_ends", time=now - ago_s, verdict="completed", exit_code=0)
        (run / "verdict.json").write_text(json.dumps(verdict))
        keep(run)
    else:
        tell(run, step=5)
    ledger.close()
    return run


def tell(run: Path, step: int) -> None:
    agents = {"n1": {"step": step, "step_s": 0.1, "silent_s": 0.1}}
    told = {"time": time.time(), "phase": "running", "members": [{"node": "n1"}], "agents": agents}
    (run / "status.json").write_text(json.dumps(told))


def screens(seen: bytes) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", one) for one in seen.decode().split("\x1b[H")]


def test_a_screen_of_runs_ends_with_q_and_gives_the_terminal_back(tmp_path: Path) -> None:
    for number in range(40):
        a_run(tmp_path, f"old{number}", ended=True, ago_s=100.0 + number)
    a_run(tmp_path, "younger")
    code, seen = typed(["top", str(tmp_path), "--every", "0.2"], b"younger", b"q", columns=80)
    assert code == 0 and seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h")
    first = next(one for one in screens(seen) if "younger" in one)
    assert re.search(r"resilio top  \d\d:\d\d:\d\d  1 running, 40 ended", first)
    assert "younger" in first.splitlines()[2] and "of 41" in first  # those under way come first
    assert all(len(line) <= 80 for line in first.splitlines()) and len(first.splitlines()) <= 24


@pytest.mark.parametrize(("keys", "code"), [(b"\x03", 130), (b"aaq", 0), (b"\x1b[B\x1b[5~j\xff\x1b", 0), (b"\x04", 0)])
def test_other_keys(tmp_path: Path, keys: bytes, code: int) -> None:
    a_run(tmp_path, "one", ended=True)
    found, seen = typed(["top", str(tmp_path)], b"one", keys)
    assert found == code and b"Traceback" not in seen


def test_without_a_terminal_it_prints_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, "one")
    assert main.main(["top", str(tmp_path)]) == 0
    assert "oneoneone" in capsys.readouterr().out
    assert main.main(["top", str(tmp_path / "nowhere")]) == 2
    assert main.main(["top", "--every", "0"]) == 2


def test_hostile_runs_and_half_made_ones_stay_on_the_screen(tmp_path: Path) -> None:
    write_hostile_run(tmp_path / "bad \x1b[31m name")
    (tmp_path / "half" / "ledger").mkdir(parents=True)
    (tmp_path / "half" / "secret").write_text("")
    code, seen = typed(["top", str(tmp_path)], b"not read", b"q")
    assert code == 0 and b"bad \x1b" not in seen and b"\xe2\x80\xae" not in seen


def summary_of(watched: WatchedRuns, run: Path) -> RunSummary:
    (found,) = summaries([run], time.time(), read=watched.read)
    assert isinstance(found, RunSummary)
    return found


def test_what_is_watched_is_what_a_first_look_finds(tmp_path: Path) -> None:
    run, watched = a_run(tmp_path, "one"), WatchedRuns()
    assert summary_of(watched, run).step == 5
    Ledger(run / "ledger", "7-n1").append("committed", step=9, seconds=0.1)
    tell(run, step=11)
    again, afresh = summary_of(watched, run), summarise(run, time.time())
    assert (again.step, again.state) == (11, "running") == (afresh.step, afresh.state)
    (run / "verdict.json").write_text(
        json.dumps({"verdict": "failed", "exit_code": 1, "time": time.time(), "job": "7"})
    )
    assert summary_of(watched, run).verdict == "failed"
    (run / "verdict.json").unlink()  # its next launch begins
    Ledger(run / "ledger", "8-supervisor-main").append("launch", time=time.time() + 3, job="8", nodes=["n1"])
    assert (summary_of(watched, run).state, summary_of(watched, run).job) == ("starting", "8")


def test_a_run_that_ended_is_read_once(tmp_path: Path) -> None:
    run, watched = a_run(tmp_path, "one", ended=True, ago_s=100.0), WatchedRuns()
    first = summary_of(watched, run)
    (run / "run.json").write_text("torn")  # not looked at
    assert summary_of(watched, run) is first
    watched.forget(set())
    (found,) = summaries([run], time.time(), read=watched.read)
    assert not isinstance(found, RunSummary)
