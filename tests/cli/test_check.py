"""``resilio check``: what it says, exit codes, and many runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.alerts.alert import rules
from resilio_hpc.cli import main
from tests.support.alerts.alert_run import AlertRun
from tests.support.report.hostile_run import write_hostile_run
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

STEPS = Script(steps=1_000_000, step_s=2.0, save_every=5)


def recent(path: Path, save_s: float = 0.2, failures: int = 0) -> AlertRun:
    """A run that has trained for eleven minutes until now."""
    run = AlertRun(path, World(nodes=2, script=STEPS), began_ago_s=660.0)
    run.world.save_s = save_s
    for _ in range(failures):
        run.world.run(limit_s=20.0)
        run.world.fail_rank(1)
    run.world.run(limit_s=1660.0 - run.world.now)
    run.write()
    return run


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_no_alert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recent(tmp_path / "run")
    assert main.main(["check", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run (running): no alert\n"


def test_each_alert_has_a_value_lines_and_one_thing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recent(tmp_path / "run", save_s=40.0, failures=7)
    assert main.main(["check", str(run.path), "--no-action", "--goodput", "99.9%"]) == 4
    out = capsys.readouterr().out
    assert "CRITICAL restart_storm since " in out and "WARNING slow_save since " in out and "low_goodput" in out
    assert "  ledger: 7-n1.jsonl:" in out
    assert f"  do: look at the file system of the checkpoints: resilio doctor --run-dir {run.path}" in out
    assert main.main(["check", str(run.path), "--json", "--no-action", "--restarts", "99"]) == 3
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    (alert,) = found["alerts"]
    assert alert["name"] == "slow_save" and alert["value"] > 30 and alert["limit"] == 30
    assert alert["do"].endswith(str(run.path))
    for line in alert["lines"]:
        file, _, number = line.rpartition(":")
        text = (run.path / "ledger" / file).read_text().splitlines()[int(number) - 1]
        assert json.loads(text)["event"] == "committed"
    assert main.main(["check", str(run.path), "--no-action", "--restarts", "99", "--save", "120"]) == 0


def test_changes_for_cron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recent(tmp_path / "run", save_s=40.0)
    argv = ["check", str(run.path), "--changes", "--no-action"]
    assert main.main(argv) == 3
    assert capsys.readouterr().out.startswith("run: WARNING slow_save since ")
    assert main.main(argv) == 3
    assert capsys.readouterr() == ("", "")
    assert main.main([*argv, "--save", "100"]) == 0
    assert capsys.readouterr().out.startswith("run: CLEAR slow_save after ")


def test_all_runs_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    recent(runs / "one", save_s=40.0)
    recent(runs / "two")
    write_hostile_run(runs / "three")
    (runs / "four").mkdir()
    (runs / "four" / "run.json").write_text("{")
    code = main.main(["check", "--all", str(runs), "--no-action", "--json"])
    found = json.loads(capsys.readouterr().out)
    names = {Path(run["run_dir"]).name: [alert["name"] for alert in run["alerts"]] for run in found["runs"]}
    assert names["one"] == ["slow_save"] and names["two"] == []
    assert code in (3, 4)
    assert [Path(one["run_dir"]).name for one in found["unread"]] == ["four"]


def test_a_hostile_run_fits_a_terminal_and_shows_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hostile_run(tmp_path / "run")
    main.main(["check", str(tmp_path / "run"), "--no-action", "--save", "0", "--load", "0"])
    out = capsys.readouterr().out
    assert out and "\x1b" not in out and "\u202e" not in out


def test_a_run_that_was_never_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"version": 1, "run_id": "0dbbcdbf63de", "created": 90.0}')
    assert main.main(["check", str(tmp_path / "run")]) == 0
    assert "no alert" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("check /nowhere/at-all", "does not exist"),
        ("check {run} --goodput much", "'much' is no number"),
        ("check {run} --save -3", "-3 is out of range"),
        ("check {run} --all .", "not both"),
        ("check --all . --state x", "--state is the file of one run"),
        ("check {run} --notify nosuchprogramatall", "was not found"),
        ("check {run} --textfile /nowhere/x.prom", "does not exist"),
        ("check {run} --action-limit 0", "must be more than 0"),
    ],
)
def test_mistakes_are_one_line(argv: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recent(tmp_path / "run")
    assert main.main(argv.format(run=tmp_path / "run").split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("resilio: error: ")


def test_every_alert_with_a_limit_has_an_option_and_all_have_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["check", "--help"])
    text = capsys.readouterr().out
    for name, rule in rules().items():
        assert rule.source and rule.do
        assert (rule.limit is None) == (not rule.option)
        assert not rule.option or f"{rule.option} " in text, name
