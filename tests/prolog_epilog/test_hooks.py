"""Health check and epilog as slurmd starts them: they return in time and say what hangs, whatever Python does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from resilio_hpc.prolog_epilog.base.node import uptime_s
from resilio_hpc.prolog_epilog.hooks.hook_files import TEMPLATES, filled
from tests.support.waiting import until


class Hook:
    """A hook in a folder; what it starts instead of Python notes its arguments and environment, and may hang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "health"
        self.started = folder / "started"
        self.python = folder / "python"
        self.plays("exit 0")

    def plays(self, then: str) -> None:
        self.python.write_text(f'#!/bin/sh\necho "$* PATH=$PATH" >>{self.started}\n{then}\n')
        self.python.chmod(0o755)

    def run(self, name: str, **settings: str) -> int:
        """The exit code, without any environment but what slurmd gives."""
        values = {"DIR": str(self.directory), "PYTHON": str(self.python), "PACKAGE": "", **settings}
        script = self.folder / f"{name}.sh"
        script.write_text(filled((TEMPLATES / f"{name}.sh").read_text(), values))
        env = {"SLURMD_NODENAME": "n1"} | ({"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "20001"} if name == "epilog" else {})
        return subprocess.run(["/bin/sh", str(script)], env=env, stderr=subprocess.DEVNULL).returncode

    def starts(self) -> list[str]:
        return self.started.read_text().splitlines() if self.started.exists() else []

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def wait_for_starts(self, count: int) -> None:
        until(lambda: len(self.starts()) >= count, f"{count} starts", self.starts)


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    return Hook(tmp_path)


def verdict(hook: Hook, age_s: float) -> None:
    hook.directory.mkdir(exist_ok=True)
    (hook.directory / "verdict").write_text(f"resilio-verdict 1\nuptime {int(uptime_s() - age_s)}\nend\n")


def test_the_health_check_starts_a_run_that_nobody_waits_for(hook: Hook) -> None:
    hook.plays("exec sleep 3600")  # the run is still there when the health check has returned
    assert hook.run("health_check") == 0
    hook.wait_for_starts(1)
    assert hook.starts()[0].startswith(
        f"-m resilio_hpc.cli.main health run --write --quiet --directory {hook.directory}"
    )
    assert "PATH=/usr/sbin:/usr/bin" in hook.starts()[0]
    pid, _ = (hook.directory / "run").read_text().split()
    assert os.getsid(int(pid)) == int(pid)  # slurmd kills the health check's own process group
    hook.run("health_check")
    assert len(hook.starts()) == 1  # one at a time
    os.kill(int(pid), 9)


def test_where_a_daemon_keeps_the_verdict_fresh_nothing_is_started_unless_somebody_asks(hook: Hook) -> None:
    verdict(hook, 10)
    hook.run("health_check", FRESH_S="60")
    assert hook.starts() == []
    (hook.directory / "wanted").touch()
    hook.run("health_check", FRESH_S="60")
    hook.wait_for_starts(1)
    (hook.directory / "wanted").unlink()
    verdict(hook, 100)
    hook.run("health_check", FRESH_S="60")
    hook.wait_for_starts(2)


def test_a_run_that_hangs_is_named_and_not_joined_by_another(hook: Hook) -> None:
    hook.directory.mkdir()
    hangs = subprocess.Popen(["sleep", "3600"])
    try:
        until(lambda: "State:\tS" in Path(f"/proc/{hangs.pid}/status").read_text(), "a process that sleeps")
        (hook.directory / "run").write_text(f"{hangs.pid} {int(uptime_s()) - 400}\n")
        assert hook.run("health_check") == 0
        assert hook.starts() == []
        assert f"(process {hangs.pid}, state S " in hook.log() and "file system that hangs?" in hook.log()
    finally:
        hangs.kill()
        hangs.wait()
    hook.run("health_check")
    hook.wait_for_starts(1)


@pytest.mark.parametrize("content", ["", "x y z\n", "99999999999999999999999 1\n", "-1 0\n", "1; reboot\n"])
def test_a_damaged_note_of_the_last_run_is_no_obstacle(hook: Hook, content: str) -> None:
    hook.directory.mkdir()
    (hook.directory / "run").write_text(content)
    assert hook.run("health_check") == 0
    hook.wait_for_starts(1)


def test_a_directory_that_is_a_link_is_not_used(hook: Hook) -> None:
    (hook.folder / "elsewhere").mkdir()
    hook.directory.symlink_to(hook.folder / "elsewhere")
    assert hook.run("health_check") == 0
    assert hook.starts() == [] and list((hook.folder / "elsewhere").iterdir()) == []


def test_the_log_does_not_grow_without_end(hook: Hook) -> None:
    verdict(hook, 1)
    (hook.directory / "log").write_text("x" * 70_000)
    hook.run("health_check")
    assert not (hook.directory / "log").exists() and (hook.directory / "log.old").exists()


def test_an_epilog_whose_python_hangs_ends_in_time_and_does_not_drain(hook: Hook) -> None:
    hook.directory.mkdir()
    hook.plays("exec sleep 3600")
    assert hook.run("epilog", BUDGET_S="1") == 0
    assert "job 7: not ended after 1 s, killed" in hook.log()
    assert (hook.directory / "wanted").exists()


def test_an_epilog_whose_python_fails_says_so_and_does_not_drain(hook: Hook) -> None:
    hook.directory.mkdir()
    hook.plays("exit 3")
    assert hook.run("epilog") == 0
    assert "job 7: ended with code 3" in hook.log()
    assert hook.run("epilog", PYTHON="/no/such/python") == 0
    assert "ended with code 127" in hook.log()
