"""A run's state from its files, whole or damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from resilio_hpc.core.errors import Untrusted, UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.report.as_json import overview_json
from resilio_hpc.report.overview import Overview, RunReader, is_closed
from resilio_hpc.report.screen import screen
from tests.support.environments import open_the_way_to
from tests.support.requirements import need_root

STATUS = {
    "v": 1, "time": 100.0, "epoch": 2, "controller": "n1", "phase": "running", "round": 3, "restarts": 4,
    "without_progress": 1, "committed": 40,
    "members": [{"node": "n1", "node_rank": 0, "address": "n1", "local_world_size": 4, "first_rank": 0},
                {"node": "n2", "node_rank": 1, "address": "n2", "local_world_size": 4, "first_rank": 4}],
    "agents": {"n1": {"silent_s": 0.1, "step": 57, "step_s": 0.5, "held": [50, 55]},
               "n2": {"silent_s": 0.2, "step": 56, "step_s": 0.25, "held": []},
               "n3": {"silent_s": 0.2, "step": -1, "step_s": 0.0, "held": []}},
    "lost": ["n4"], "refused": {"refused": 0, "dropped": 0},
}  # fmt: skip
VERDICT = {"v": 1, "time": 101.0, "job": "7", "verdict": "no_progress", "exit_code": 1, "reason": "3 restarts",
           "committed": 40, "first_failure": {"rank": 1, "node": "n1", "signal": 9, "exit_code": None,
                                              "message": "killed by SIGKILL"}}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run_id": "abc", "created": 1.0}))
    launch(tmp_path, "7", 10.0)
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    return tmp_path


def launch(path: Path, job: str, at: float) -> None:
    Ledger(path / "ledger", f"{job}-supervisor-main", clock=lambda: at).append("launch", job=job, nodes=["n1"])


def text_of(overview: Overview, width: int = 120, height: int = 40, recent: int = 5) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(screen(overview, height, recent, width))
    return captured.get()


def test_a_running_run(run: Path) -> None:
    o = RunReader(run).overview(now=101.0)
    assert (o.state, o.run_id, o.job) == ("running", "abc", "7")
    assert o.status is not None
    assert (o.status.step, o.status.steps_per_s, o.status.world_size) == (57, 2.0, 8)
    assert [(n.node, n.role, n.rank_words) for n in o.status.nodes] == [
        ("n1", "training", "0–3"), ("n2", "training", "4–7"), ("n3", "spare", ""), ("n4", "lost", ""),
    ]  # fmt: skip
    text = text_of(o)
    for said in ("running", "3: 8 ranks, controller n1 (epoch 2)", "57, 2 steps/s", "step 40 committed"):
        assert said in text


@pytest.mark.parametrize(
    ("now", "verdict", "later_job", "state"),
    [
        (101.0, None, None, "running"),
        (400.0, None, None, "stale"),
        (400.0, VERDICT, None, "ended"),
        (105.0, VERDICT, 104.0, "starting"),  # the next job of the chain
        (400.0, VERDICT, 104.0, "stale"),
        (50.0, None, None, "running"),  # a clock that is behind
    ],
)
def test_states(run: Path, now: float, verdict: dict[str, Any] | None, later_job: float | None, state: str) -> None:
    if verdict:
        (run / "verdict.json").write_text(json.dumps(verdict))
    if later_job:
        launch(run, "8", later_job)
    o = RunReader(run).overview(now)
    assert o.state == state
    assert (o.verdict is not None) == (state == "ended")
    said = {"stale": "nothing was heard for", "ended": "ended: no progress (3 restarts)"}
    assert said.get(state, "") in text_of(o)


def test_the_end_names_the_first_failure(run: Path) -> None:
    (run / "verdict.json").write_text(json.dumps(VERDICT))
    assert "rank 1 on n1: killed by SIGKILL" in text_of(RunReader(run).overview(200.0))


def test_what_a_restore_took_and_a_save_blocked_is_shown(run: Path) -> None:
    ledger = Ledger(run / "ledger", "7-n1-agent", clock=lambda: 20.0)
    ledger.append("first_step", round=1, step=41, restored=40, source="memory", restore_s=0.25)
    ledger.append("committed", step=50, blocked_s=0.5)
    overview = RunReader(run).overview(21.0)
    assert overview_json(overview).count('"blocked_s": 0.5') == 1
    text = text_of(overview)
    assert "step 50 committed; training waited 0.50 s for it" in text
    assert "step 40 from memory in 0.25 s" in text


def test_each_event_is_told_once_whoever_read_it(run: Path) -> None:
    reader = RunReader(run)
    assert [event.kind for event in reader.new_events()] == ["launch"]
    ledger = Ledger(run / "ledger", "7-n1-agent", clock=lambda: 20.0)
    ledger.append("committed", step=1)
    assert [event.kind for event in reader.overview(21.0).events] == ["launch", "committed"]
    ledger.append("committed", step=2)
    assert [event.fields["step"] for event in reader.new_events()] == [1, 2]
    assert reader.new_events() == []


@pytest.mark.parametrize(("now", "ends", "closed"), [(101.5, False, False), (101.5, True, True), (105.0, False, True)])
def test_after_the_verdict_the_last_lines_have_a_moment(run: Path, now: float, ends: bool, closed: bool) -> None:
    assert not is_closed(RunReader(run).overview(101.0))
    (run / "verdict.json").write_text(json.dumps(VERDICT))
    if ends:
        Ledger(run / "ledger", "7-supervisor", clock=lambda: 101.2).append("launch_ends", exit_code=1)
    assert is_closed(RunReader(run).overview(now)) == closed


def test_verdicts_before_a_launch_do_not_end_its_view(run: Path) -> None:
    (run / "verdict.json").write_text(json.dumps(VERDICT))
    o = RunReader(run).overview(now=500.0, since=499.0)
    assert (o.state, o.status, o.verdict) == ("starting", None, None)


def test_many_nodes_and_faults_fit_the_screen(run: Path) -> None:
    agents = {f"n{i}": {"silent_s": 0.1, "step": 5, "step_s": 0.1} for i in range(500)}
    members = [{"node": f"n{i}", "local_world_size": 8, "first_rank": 8 * i} for i in range(500)]
    (run / "status.json").write_text(json.dumps(STATUS | {"agents": agents, "members": members, "lost": ["n499"]}))
    ledger = Ledger(run / "ledger", "7-n1", clock=lambda: 50.0)
    for _ in range(100):
        ledger.append("recovered", kind="rank_killed", node="n1", rank=3, recovery_s=1.0, lost_steps=0)
    text = text_of(RunReader(run).overview(101.0), height=30)
    assert len(text.splitlines()) <= 31
    assert "n499" in text and "more nodes" in text and "before" in text


DAMAGED: list[object] = [
    "", "{", "null", "[]", "7", '{"time": "now"}', '{"time": NaN}', "\x00\xff", "[" * 100_000, " " * (5 << 20),
    json.dumps(STATUS)[:100],
    json.dumps(STATUS | {"members": 3, "agents": [], "lost": {}}),
    json.dumps(STATUS | {"members": [None, {"node": 3}, {"first_rank": "x"}], "agents": {"n1": None}, "lost": [1]}),
    json.dumps(STATUS | {"members": [{"node": "\x1b[2J", "local_world_size": 10**30, "first_rank": -7}]}),
    json.dumps(STATUS | {"time": 1e300, "round": 10**400, "epoch": None, "committed": [], "phase": "[red]x[/red]"}),
    json.dumps(VERDICT | {"time": -1e300, "exit_code": "x", "job": 3, "reason": "\x1b]0;x\x07", "first_failure": [1]}),
    json.dumps(VERDICT | {"first_failure": {"signal": 10**30, "message": 5, "rank": []}}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["status.json", "verdict.json", "ledger/7-n1.jsonl"])
@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_no_damage_breaks_the_picture(run: Path, name: str, number: int) -> None:
    (run / name).write_text(str(DAMAGED[number]), errors="surrogateescape")
    o = RunReader(run).overview(101.0)
    text = text_of(o)
    assert "run abc" in text and "\x1b]" not in text and "\x1b[2J" not in text
    assert json.loads(overview_json(o))["run_id"] == "abc"


@pytest.mark.parametrize("name", ["status.json", "verdict.json", "run.json"])
def test_a_pipe_or_a_directory_in_place_of_a_file_is_named_and_holds_nobody(run: Path, name: str) -> None:
    for make in (os.mkfifo, Path.mkdir):
        (run / name).unlink(missing_ok=True) if not (run / name).is_dir() else (run / name).rmdir()
        make(run / name)
        with pytest.raises(Untrusted, match=f"{name} is no regular file"):
            RunReader(run).overview(101.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a run directory of resilio (no run.json)"),
        ("", "run.json is damaged"),
        ("[]", "run.json is damaged"),
        ('{"version": "1", "run_id": "x"}', "run.json is damaged"),
        ('{"version": 1}', "run.json is damaged"),
        ('{"version": 99, "run_id": "x"}', "newer resilio (format 99)"),
    ],
)
def test_what_is_no_run_directory_is_said_so(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=said.replace("(", r"\(").replace(")", r"\)")):
        RunReader(tmp_path)


@pytest.mark.parametrize("hidden", ["", "run.json"])
def test_another_users_run_is_said_to_be_hidden(run: Path, hidden: str) -> None:
    need_root()
    open_the_way_to(run.parent)
    (run / hidden).chmod(0)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            RunReader(run)
        except UsageError as error:
            os._exit(0 if str(error).endswith("cannot be read: Permission denied") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("name", "said"), [("gone", "does not exist"), ("file", "is not a directory")])
def test_a_wrong_path_is_said_so(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=said):
        RunReader(tmp_path / name)


def test_memory_that_is_nearly_full_is_shown_while_it_lasts(run: Path) -> None:
    agents = {f"m{n:02}": {"step": 1, "memory": f"memory: 9{n % 10} % of \x1b[31m1 TiB in use"} for n in range(9)}
    (run / "status.json").write_text(json.dumps(STATUS | {"agents": agents}))
    text = " ".join(text_of(RunReader(run).overview(now=101.0), width=60).split())
    assert "memory m00: memory: 90 % of ?[31m1 TiB in use; m01:" in text
    assert "and 5 more nodes" in text
    (run / "verdict.json").write_text(json.dumps(VERDICT))
    assert "m00" not in text_of(RunReader(run).overview(now=102.0))
