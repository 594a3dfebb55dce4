"""docs/alerts.md: its table is that of the code, and its lines for cron and scrontab do what the page says."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.alerts.alert_run import AlertRun
from tests.support.environments import ROOT
from tests.support.launch.webhook_server import Server
from tests.support.pages import blocks
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World
from tests.support.waiting import PATIENCE_S

PAGE = ROOT / "docs" / "alerts.md"
SCHEDULED = re.compile(r"^(\S+ \S+ \S+ \S+ \S+) (/\S.*)$", re.MULTILINE)
LINES = [line for block in blocks(PAGE, "crontab") for line in SCHEDULED.findall(block)]


def test_the_table_is_that_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["with_alerts"](PAGE.read_text())
    assert PAGE.read_text() == made, "run scripts/reference.py"


def slow_run(path: Path) -> AlertRun:
    """A run until now whose newest save was slow."""
    run = AlertRun(path, World(nodes=2, script=Script(steps=10**6, step_s=2.0, save_every=5)), began_ago_s=300.0)
    run.world.save_s = 40.0
    run.world.run(limit_s=1300.0 - run.world.now)
    run.write()
    return run


@pytest.mark.parametrize("number", range(len(LINES)), ids=["cron", "scrontab"])
def test_a_line_for_cron_reports_once_when_an_alert_fires_and_once_when_it_clears(number: int, tmp_path: Path) -> None:
    """The command is started as cron does: by sh, in the home directory, with nearly no environment."""
    schedule, command = LINES[number]
    assert all(re.fullmatch(r"[\d*/,-]+", field) for field in schedule.split())
    runs, server = tmp_path / "resilio-runs", Server(200)
    runs.mkdir()
    run = slow_run(runs / "large")
    (tmp_path / ".resilio-notify").write_text(f"{server.url}\n")
    words = {
        "/home/me/venv/bin/resilio": f"{shlex.quote(sys.executable)} -m resilio_hpc.cli.main",
        "/scratch/me/resilio-runs": str(runs), "/home/me/": f"{tmp_path}/",
    }  # fmt: skip
    for word, instead in words.items():
        command = command.replace(word, instead)
    environment = {"HOME": str(tmp_path), "LOGNAME": "me", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    environment |= {"PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"}

    def cron() -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode in (0, 3) and done.stderr == "", done.stderr
        return done.stdout

    try:
        first = cron()
        assert first.startswith("large: WARNING slow_save since ") and "  storage check: " in first
        assert cron() == ""
        run.world.save_s = 0.2
        run.after += time.time() - run.now - 60.0  # what the check has taken
        run.world.run(limit_s=60.0)
        run.write()
        assert cron().startswith("large: CLEAR slow_save after ")
        assert cron() == ""
    finally:
        server.close()
    told = [message["event"] for _, message in server.received]
    assert told == (["alert", "clear"] if "--notify" in command else [])
