"""What was reported is kept: an alert is reported once when it fires and once when it clears, also on a full disk."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from resilio_hpc.alerts import actions, memory
from resilio_hpc.alerts.alert import Alert, Severity
from resilio_hpc.alerts.check import CheckOptions, RunCheck, check_run
from resilio_hpc.alerts.memory import AlertMemory, MemoryFile
from resilio_hpc.core.errors import CommandError, ResilioError, Untrusted
from tests.support.alerts.alert_run import AlertRun
from tests.support.mounts import mounted
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

STEPS = Script(steps=1_000_000, step_s=2.0, save_every=5)
KEEPS = CheckOptions(keeps=True, action_s=0.0)


def slow(name: str = "slow_save", severity: Severity = Severity.WARNING, since: float = 5.0) -> Alert:
    return Alert(name, severity, since, "it took long", "do this")


def run_with_a_slow_save(path: Path) -> AlertRun:
    run = AlertRun(path, World(nodes=2, script=STEPS))
    run.world.save_s = 40.0
    run.world.run(limit_s=120.0)
    run.write()
    return run


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def checked(run: AlertRun, options: CheckOptions = KEEPS) -> RunCheck:
    run.write()
    return check_run(run.path, options, run.now)


def test_once_when_it_fires_and_once_when_it_clears(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    assert [alert.name for alert in checked(run).new.fired] == ["slow_save"]
    again = checked(run)
    assert [alert.name for alert in again.alerts] == ["slow_save"] and again.new.fired == ()
    run.world.save_s = 0.2
    run.world.run(limit_s=120.0)
    cleared = checked(run)
    assert [one.name for one in cleared.new.cleared] == ["slow_save"] and cleared.errors == ()
    assert checked(run).new.cleared == ()
    run.world.save_s = 40.0
    run.world.run(limit_s=120.0)
    assert [alert.name for alert in checked(run).new.fired] == ["slow_save"]  # it fires again


def test_a_plain_look_takes_nothing_away(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    assert checked(run, CheckOptions(action_s=0.0)).alerts
    assert not (run.path / memory.FILE).exists()
    assert [alert.name for alert in checked(run).new.fired] == ["slow_save"]


def test_a_warning_that_becomes_critical_is_news_once() -> None:
    before = memory.after(AlertMemory(), [slow()], 10.0, None)
    worse = [slow(severity=Severity.CRITICAL)]
    assert memory.changes(before, worse).fired == tuple(worse)
    kept = memory.after(before, worse, 20.0, None)
    eased = [slow()]
    assert memory.changes(kept, eased).fired == ()
    assert memory.changes(memory.after(kept, eased, 30.0, None), worse).fired == ()


def test_since_when_is_kept_and_a_step_that_stands_still_too() -> None:
    kept = memory.after(AlertMemory(), [slow(since=5.0)], 10.0, 7)
    kept = memory.after(kept, [slow(since=9.0)], 20.0, 7)
    assert kept.reported["slow_save"].since == 5.0
    assert kept.step is not None and (kept.step.step, kept.step.time) == (7, 10.0)
    kept = memory.after(kept, [], 30.0, 8)
    assert kept.step is not None and (kept.step.step, kept.step.time) == (8, 30.0)
    assert memory.after(kept, [], 40.0, None).step == kept.step


def test_a_second_check_waits_for_the_first_and_not_for_ever(tmp_path: Path) -> None:
    file = MemoryFile([tmp_path / "alerts.json"])
    fd = os.open(tmp_path / ".alerts.json.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ResilioError, match="another check of this run"), file.locked(wait_s=0.2):
        pass
    os.close(fd)
    with file.locked(wait_s=0.2):
        pass


def test_two_checks_at_once_report_an_alert_once(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            found = check_run(run.path, KEEPS, run.now)
            (tmp_path / f"fired{number}").write_text(str(len(found.new.fired)))
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert sorted((tmp_path / f"fired{number}").read_text() for number in range(2)) == ["0", "1"]


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    for damaged in (b"", b"{", b'{"v": 1, "reported": 7}', b'{"v": 99}', b"\xff\xfe", b"[" * 100_000):
        (run.path / memory.FILE).write_bytes(damaged)
        assert [alert.name for alert in checked(run).new.fired] == ["slow_save"]


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    (run.path / memory.FILE).write_text("{}")
    (run.path / memory.FILE).chmod(0o666)
    with pytest.raises(Untrusted, match="chmod go-w"):
        checked(run)


def test_a_named_file_is_the_only_one(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    options = replace(KEEPS, state=tmp_path / "elsewhere" / "of this run.json")
    assert checked(run, options).new.fired and not checked(run, options).new.fired
    assert not (run.path / memory.FILE).exists()
    assert json.loads((tmp_path / "elsewhere" / "of this run.json").read_text())["reported"].keys() == {"slow_save"}


@pytest.mark.parametrize("option", ["size=256k", "ro"])
def test_a_run_directory_that_is_full_or_read_only(tmp_path: Path, option: str) -> None:
    with mounted(tmp_path / "disk", "size=256k") as disk:
        run = run_with_a_slow_save(disk / "run")
        run.close()
        if option == "ro":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        else:
            with pytest.raises(OSError, match="No space"), open(disk / "filler", "wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
        first = check_run(run.path, KEEPS, run.now)
        assert [alert.name for alert in first.new.fired] == ["slow_save"] and first.errors == ()
        assert check_run(run.path, KEEPS, run.now).new.fired == ()  # kept in the user's own state directory
        assert not (run.path / memory.FILE).exists()


def test_where_nothing_can_be_kept_the_alert_is_still_reported(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    (tmp_path / "a file").touch()
    options = replace(KEEPS, state=tmp_path / "a file" / "state.json")
    for _ in range(2):
        found = checked(run, options)
        assert [alert.name for alert in found.new.fired] == ["slow_save"]
        assert "reported again" in found.errors[0]


def test_clocks_that_jump_harm_nothing(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    for now in (run.now + 1e9, run.now, 0.0, run.now - 1e8):
        check_run(run.path, KEEPS, now)


# -- what an alert sets off --------------------------------------------------------------------------------------------


def test_low_goodput_and_a_slow_save_set_off_a_look(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    facts = run.facts()
    (alert,) = run.alerts().values()
    found = actions.act(alert, facts)
    assert any(line.startswith("run-directory: ") for line in found)  # the real doctor has looked
    run.world.life.absent.add(1)
    run.world.run(limit_s=800.0)
    low = run.alerts()["low_goodput"]
    (run.path / "logs" / "0" / "n1").mkdir(parents=True)
    (run.path / "logs" / "0" / "n1" / "1.log").write_text("RuntimeError: CUDA error: an illegal memory access\n")
    found = actions.act(low, run.facts())
    assert found[0].startswith("time went to detect (") and any("the logs say" in line for line in found)


def test_a_look_that_hangs_ends_with_its_deadline(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    facts = run.facts()
    (alert,) = run.alerts().values()

    def late(words: object, deadline_s: float) -> str:
        raise CommandError(["doctor"], None, why=f"no answer within {deadline_s:g} s")

    assert actions.act(alert, facts, 0.5, late)[-1] == "the storage check was not done: no answer within 0.5 s"
    assert "was not done" in actions.act(alert, facts, 0.01)[-1]  # the real one does not start in that time


def test_no_look_for_other_alerts_and_where_none_is_wanted(tmp_path: Path) -> None:
    run = run_with_a_slow_save(tmp_path / "run")
    assert actions.act(slow("stalled"), run.facts()) == ()
    assert checked(run, replace(KEEPS, action_s=0.0)).found == {}
