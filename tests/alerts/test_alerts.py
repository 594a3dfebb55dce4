"""Each alert, where it fires and where it clears: ledgers and status of real controllers, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.alerts.alert import Severity
from resilio_hpc.alerts.of_progress import goodput_share
from resilio_hpc.alerts.run_facts import StepSeen
from resilio_hpc.launch.controller.checkpoints.slow_saves import SlowSaves
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir import chain_order
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from tests.support.alerts.alert_run import AlertRun
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

STEPS = Script(steps=1_000_000, step_s=2.0, save_every=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_run_without_trouble_has_no_alert(path: Path) -> None:
    run = AlertRun(path, World(nodes=3, spares=1, script=STEPS))
    assert run.names() == []  # its launch has just begun
    for _ in range(4):
        run.world.run(limit_s=300.0)
        assert run.names() == []


def test_low_goodput(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, hang_timeout_s=0.0))
    run.world.run(limit_s=400.0)
    began = run.now
    run.world.life.absent.add(1)
    run.world.run(limit_s=280.0)
    alert = run.alerts()["low_goodput"]
    assert alert.value is not None and 0.5 < alert.value < 0.8
    assert began < alert.since < run.now
    assert "stalled" in alert.text and alert.places
    assert run.names(low_goodput=0.5) == ["stalled"]
    run.world.life.absent.clear()
    run.world.run(limit_s=1500.0)
    assert run.names() == []


def test_goodput_of_the_last_hours_forgets_what_was_before(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, hang_timeout_s=0.0))
    run.world.run(limit_s=60.0)
    run.world.life.absent.add(1)
    run.world.run(limit_s=700.0)
    run.world.life.absent.clear()
    run.world.run(limit_s=1300.0)
    facts = run.facts()
    whole, newest = goodput_share(facts), goodput_share(facts, 900.0)
    assert whole is not None and newest is not None
    assert whole < 0.8 < newest
    assert whole == pytest.approx(facts.time.goodput)  # the number of resilio report


def test_ranks_that_are_down(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=Script(steps=10**6, step_s=2.0, save_every=5, start_s=4.0)))
    run.world.run(limit_s=330.0)
    assert run.names() == []
    run.world.fail_rank(1)
    run.world.run(limit_s=30.0)
    alert = run.alerts()["not_alive"]
    assert alert.value is not None and 0.9 < alert.value < 0.995
    assert any(line.kind == "rank_failed" for line in alert.lines)
    run.world.run(limit_s=310.0)
    assert run.names() == []


def test_a_slow_save(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    run.world.run(limit_s=60.0)
    run.world.save_s = 40.0
    run.world.run(limit_s=120.0)
    alert = run.alerts()["slow_save"]
    assert alert.value is not None and 40.0 <= alert.value < 100.0
    assert [line.kind for line in alert.lines] == ["committed"]
    run.world.save_s = 0.2
    run.world.run(limit_s=120.0)
    assert run.names() == []


def test_a_save_that_does_not_end(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    run.world.run(limit_s=60.0)
    saves = SlowSaves()  # beside the controller; a virtual host has none
    saves.ordered("n2", m.PersistStep(1, 0, 30), run.world.now)
    run.world.run(limit_s=100.0)
    told = saves.overdue(run.world.now)
    assert told is not None
    run.world.record("save_overdue", told)
    run.world.slow_savers = dict.fromkeys(run.world.sites, 200.0)
    run.world.run(limit_s=20.0)
    alert = run.alerts()["slow_save"]
    assert "has taken" in alert.text and [line.kind for line in alert.lines] == ["save_overdue"]
    assert alert.value is not None and alert.value > 60.0
    run.world.slow_savers.clear()
    run.world.run(limit_s=300.0)
    assert run.names() == []


def test_a_slow_load(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    run.world.run(limit_s=60.0)
    assert "slow_load" not in run.names(slow_load=0.0)  # nothing was loaded
    run.world.fail_rank(1)
    run.world.run(limit_s=60.0)
    loaded = run.world.records("first_step")[-1]
    assert loaded["restored"] > 0
    assert "slow_load" not in run.names()
    alerts = run.alerts(slow_load=loaded["restore_s"] - 1e-6)
    assert alerts["slow_load"].lines[0].kind == "first_step"
    run.world.load_s = 61.0
    run.world.fail_rank(1)
    run.world.run(limit_s=60.0)
    assert run.alerts()["slow_load"].value == 61.0
    run.world.load_s = 0.5
    run.world.fail_rank(1)
    run.world.run(limit_s=60.0)
    assert "slow_load" not in run.names()  # a faster one clears it
    assert "slow_load" not in run.alerts(later_s=25 * 3600.0, slow_load=0.0)  # a load of yesterday is no news


def test_a_job_of_which_nothing_is_heard(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    run.world.run(limit_s=60.0)
    assert run.alerts(later_s=100.0) == {}
    alert = run.alerts(later_s=400.0)["no_news"]
    assert alert.severity is Severity.CRITICAL and alert.value == pytest.approx(400.0, abs=1.0)
    run.world.run(limit_s=400.0)
    assert run.names() == []


def test_steps_that_stand_still(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, hang_timeout_s=0.0))
    run.world.run(limit_s=300.0)
    run.world.life.absent.add(1)
    run.world.run(limit_s=60.0)
    alert = run.alerts()["stalled"]
    assert alert.lines[0].kind == "stalled" and run.now - 65.0 < alert.since < run.now
    run.world.life.absent.clear()
    run.world.run(limit_s=60.0)
    assert run.names() == []


def test_a_job_that_trains_no_more_after_the_ranks_are_gone(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, start_timeout_s=10_000.0))
    run.world.run(limit_s=60.0)
    run.world.script = Script(steps=10**6, step_s=2.0, save_every=5, start_s=610.0)
    run.world.fail_rank(1)
    run.world.run(limit_s=600.0)
    assert "stalled" not in run.alerts()
    alert = run.alerts(stalled=300.0)["stalled"]
    assert alert.value is not None and 580.0 < alert.value < 640.0
    run.world.run(limit_s=60.0)
    assert "stalled" not in run.alerts(stalled=300.0)


def test_steps_without_commits_are_progress_that_checks_remember(path: Path) -> None:
    never = Script(steps=10**6, step_s=2.0, save_every=10**6)
    run = AlertRun(path, World(nodes=2, script=never))
    run.world.run(limit_s=600.0)
    facts = run.facts()
    assert facts.state.status is not None and facts.state.status.step is not None
    seen = StepSeen(facts.state.status.step, run.now - 500.0)
    assert "stalled" in run.alerts(seen, stalled=300.0)  # an earlier check saw the same step
    run.world.run(limit_s=20.0)
    assert "stalled" not in run.alerts(seen, stalled=300.0)
    assert "stalled" not in run.alerts(stalled=300.0)  # the first check cannot tell


def test_too_many_failures(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    for _ in range(5):
        run.world.run(limit_s=60.0)
        run.world.fail_rank(1)
    run.world.run(limit_s=60.0)
    assert "restart_storm" not in run.names()
    run.world.fail_rank(2)
    run.world.run(limit_s=60.0)
    alert = run.alerts()["restart_storm"]
    assert (alert.value, alert.severity) == (6.0, Severity.CRITICAL)
    assert "6 rank killed" in alert.text
    run.world.run(limit_s=3600.0)
    assert run.names() == []


def test_few_restarts_are_left(path: Path) -> None:
    never = Script(steps=10**6, step_s=2.0, save_every=200)
    run = AlertRun(path, World(nodes=2, script=never))
    for _ in range(2):
        assert "budget_low" not in run.names()
        run.world.run(limit_s=60.0)
        run.world.fail_rank(1)
    run.world.run(limit_s=60.0)
    alert = run.alerts()["budget_low"]
    assert (alert.value, [line.kind for line in alert.lines]) == (1.0, ["decision", "decision"])
    run.world.run(limit_s=800.0)  # a step becomes durable
    assert run.world.records("committed")
    assert "budget_low" not in run.names()


def test_no_spare_is_left(path: Path) -> None:
    run = AlertRun(path, World(nodes=3, spares=1, script=STEPS))
    run.world.run(limit_s=60.0)
    run.world.power_off("n2")
    run.world.run(limit_s=60.0)
    assert "n4" in run.world.members()
    alerts = run.alerts()
    assert (alerts["spares_spent"].value, alerts["spares_spent"].severity) == (0.0, Severity.WARNING)
    run.world.sites["n2"].off = False
    run.world.start_agent("n2")
    run.world.run(limit_s=60.0)
    assert "spares_spent" not in run.alerts()


def test_a_node_at_fault(path: Path) -> None:
    run = AlertRun(path, World(nodes=3, spares=1, script=STEPS))
    run.world.run(limit_s=60.0)
    run.world.power_off("n2")
    run.world.run(limit_s=60.0)
    alert = run.alerts()["suspect_node n2"]
    assert (alert.about, alert.severity) == ("n2", Severity.WARNING)  # no rank runs there any more
    assert [line.kind for line in alert.lines] == ["node_lost"]
    run.world.run(limit_s=400.0)
    assert "suspect_node n2" in run.alerts()
    assert "suspect_node n2" not in run.alerts(suspect_node=0.1)  # six minutes


def test_a_node_at_fault_on_which_ranks_run_is_critical(path: Path) -> None:
    run = AlertRun(path, World(nodes=3, script=STEPS))
    run.world.run(limit_s=60.0)
    run.world.cut("n2")
    run.world.run(limit_s=12.0)
    run.world.cut("n2", cut=False)
    run.world.run(limit_s=60.0)
    alert = run.alerts()["suspect_node n2"]
    assert alert.severity is Severity.CRITICAL and alert.text.endswith("ranks run on it")


def test_a_time_limit_that_was_taken_for_a_failure(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS), end_time_s=1180.0)
    run.world.run(limit_s=170.0)
    run.world.fail_rank(1, signal=9)  # by Slurm: nothing has told the launcher of the limit
    run.world.run(limit_s=1.0)
    for node in ("n1", "n2"):
        run.world.kill_agent(node)
    run.world.run(limit_s=30.0)
    run.say("launch_ends", verdict="agents_lost", exit_code=1)
    alert = run.alerts()["time_limit_as_failure"]
    assert alert.value == pytest.approx(10.0, abs=0.5)
    run.next_job("8", World(nodes=2, script=STEPS), end_time_s=9000.0)
    run.world.run(limit_s=60.0)
    assert "time_limit_as_failure" in run.alerts()  # the newest job that has ended is still that one
    run.world.warn("USR2")
    run.world.until_over()
    run.say("launch_ends", verdict="time_limit", exit_code=75)
    assert "time_limit_as_failure" not in run.alerts()


def test_a_chain_without_a_job_left(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, chained=True), chain_max=1)
    run.world.run(limit_s=60.0)
    alert = run.alerts()["chain_exhausted"]
    assert (alert.value, alert.severity) == (0.0, Severity.WARNING)  # there is still time to allow more
    run.world.warn("USR2")
    assert run.world.until_over()["verdict"] == "time_limit"
    run.say("launch_ends", verdict="time_limit", exit_code=75)
    alert = run.alerts()["chain_exhausted"]
    assert (alert.value, alert.severity) == (0.0, Severity.CRITICAL)
    run.say("successor", job="8", link=2, acted=True)  # its user has extended it
    chain_order.write(path, ChainOrder(limit=9, by="me", time=run.now))
    assert run.names() == []
    run.next_job("8", World(nodes=2, script=STEPS, chained=True))
    run.world.run(limit_s=60.0)
    assert run.names() == []


def test_a_chain_that_its_user_stopped_is_no_alert(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, chained=True), chain_max=1)
    run.world.run(limit_s=60.0)
    chain_order.write(path, ChainOrder(stopped=True, by="me", time=run.now))
    assert run.names() == []


def test_a_site_that_allows_no_next_job_yet(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=STEPS, chained=True), chain_max=5)
    run.world.run(limit_s=60.0)
    run.say("successor_refused", limit="MaxSubmitJobs")
    alert = run.alerts()["chain_exhausted"]
    assert "MaxSubmitJobs" in alert.text and alert.severity is Severity.WARNING
    run.say("successor", job="8", link=2, acted=True)
    assert run.names() == []


def test_a_run_that_failed(path: Path) -> None:
    never = Script(steps=10**6, step_s=2.0, save_every=10**6)
    run = AlertRun(path, World(nodes=2, script=never))
    for _ in range(4):
        run.world.run(limit_s=60.0)
        run.world.fail_rank(1)
    assert run.world.until_over()["verdict"] == "no_progress"
    run.say("launch_ends", verdict="no_progress", exit_code=1)
    alerts = run.alerts()
    assert set(alerts) == {"run_failed"} and alerts["run_failed"].severity is Severity.CRITICAL
    run.next_job("8", World(nodes=2, script=STEPS))  # its user has started it again
    run.world.run(limit_s=900.0)
    assert "run_failed" not in run.alerts()


def test_a_run_that_is_complete_has_no_alert(path: Path) -> None:
    run = AlertRun(path, World(nodes=2, script=Script(steps=40, step_s=2.0, save_every=5)))
    for _ in range(2):
        run.world.run(limit_s=20.0)
        run.world.fail_rank(1)
    assert run.world.until_over()["verdict"] == "completed"
    run.say("launch_ends", verdict="completed", exit_code=0)
    assert run.alerts(later_s=10_000.0, low_goodput=1.0, restart_storm=0.0, slow_save=0.0) == {}
