"""Alerts as messages: to real servers and commands, once, kept where a target is away, and never waited for long."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resilio_hpc.alerts import delivery
from resilio_hpc.alerts.check import CheckOptions, RunCheck, check_run
from resilio_hpc.alerts.memory import FILE, AlertMemory, UndeliveredMessage
from resilio_hpc.launch.rundir.notify_targets import parse_target
from tests.support.alerts.alert_run import AlertRun
from tests.support.launch.mail_server import MailServer
from tests.support.launch.webhook_server import Server
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

STEPS = Script(steps=1_000_000, step_s=2.0, save_every=5)


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(200)
    yield found
    found.close()


def options(*targets: str) -> CheckOptions:
    return CheckOptions(keeps=True, action_s=0.0, targets=tuple(parse_target(one) for one in targets))


def slow_run(path: Path) -> AlertRun:
    run = AlertRun(path, World(nodes=3, spares=1, script=STEPS))
    run.world.save_s = 40.0
    run.world.run(limit_s=120.0)
    return run


def checked(run: AlertRun, asked: CheckOptions) -> RunCheck:
    run.write()
    return check_run(run.path, asked, run.now)


def test_one_message_when_it_fires_and_one_when_it_clears(tmp_path: Path, server: Server) -> None:
    run = slow_run(tmp_path / "run")
    for _ in range(3):
        assert checked(run, options(server.url)).errors == ()
    ((_, fired),) = server.received
    assert (fired["event"], fired["alert"], fired["severity"]) == ("alert", "slow_save", "warning")
    assert fired["text"].startswith("run: warning slow_save: the checkpoint of step ") and fired["lines"]
    assert fired["do"].endswith(f"--run-dir {run.path}") and fired["value"] > fired["limit"] == 30.0
    run.world.save_s = 0.2
    run.world.run(limit_s=120.0)
    checked(run, options(server.url))
    _, (_, cleared) = server.received
    assert (cleared["event"], cleared["alert"]) == ("clear", "slow_save")


def test_isolate_this_node(tmp_path: Path) -> None:
    run = AlertRun(tmp_path / "run", World(nodes=3, spares=1, script=STEPS))
    run.world.run(limit_s=60.0)
    run.world.power_off("n2")
    run.world.run(limit_s=60.0)
    out = tmp_path / "isolated"
    script = 'test "$RESILIO_EVENT" = isolate || exit 0; echo "$RESILIO_NODE $RESILIO_ALERT" >> "$1"'
    assert checked(run, options(f"sh -c '{script}' sh {out}")).errors == ()
    assert out.read_text() == "n2 suspect_node\n"


def test_a_target_that_is_away_gets_it_at_the_next_check_and_no_other_twice(tmp_path: Path, server: Server) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{probe.getsockname()[1]}/SECRET"
    run = slow_run(tmp_path / "run")
    (error,) = checked(run, options(server.url, away)).errors
    assert "is tried again at the next check" in error and "SECRET" not in error
    assert "SECRET" not in (run.path / FILE).read_text()
    assert len(checked(run, options(server.url, away)).errors) == 1
    assert len(server.received) == 1
    assert checked(run, options(server.url)).errors == ()  # the target is not wanted any more: its message is dropped
    assert json.loads((run.path / FILE).read_text())["undelivered"] == []


def test_a_target_that_hangs_holds_up_neither_the_check_nor_others(tmp_path: Path, server: Server) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hangs = parse_target(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        sleeps = parse_target("sleep 1000")
        fine = parse_target(server.url)
        marks = tuple(delivery.mark(target) for target in (hangs, sleeps, fine))
        memory = AlertMemory(undelivered=(UndeliveredMessage({"v": 1, "event": "alert", "text": "x"}, marks),))
        began = time.monotonic()
        left, errors = delivery.deliver(memory, (hangs, sleeps, fine), deadline_s=1.5)
        assert time.monotonic() - began < 60.0
    assert len(errors) == 2 and all("not delivered within 1.5 s" in error for error in errors)
    assert [one.targets for one in left.undelivered] == [marks[:2]]
    assert len(server.received) == 1


def test_a_mail_by_apprise(tmp_path: Path) -> None:
    server = MailServer()
    run = slow_run(tmp_path / "run")
    url = f"mailto://127.0.0.1:{server.port}?from=resilio@example.org&to=me@example.org&mode=insecure"
    assert checked(run, options(url)).errors == ()
    server.close()
    (mail,) = server.received
    body = mail.get_body(("plain", "html"))
    assert body is not None and "slow_save" in body.get_content()


def test_a_message_that_was_kept_before_a_kill_is_sent(tmp_path: Path, server: Server) -> None:
    """The memory is written before anything is sent; a check that is killed there has told no target."""
    run = slow_run(tmp_path / "run")
    asked = options(server.url)
    target = asked.targets[0]
    first = checked(run, replace(asked, targets=()))  # reported on the terminal only
    assert [alert.name for alert in first.new.fired] == ["slow_save"]
    path = run.path / FILE
    kept = json.loads(path.read_text())
    kept["undelivered"] = [{"content": {"v": 1, "text": "of before"}, "targets": [delivery.mark(target)]}]
    path.write_text(json.dumps(kept))
    checked(run, asked)
    assert [message["text"] for _, message in server.received] == ["of before"]
