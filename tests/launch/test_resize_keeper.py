"""The resizer beside a launch: started again when it fails, and gone when the launch is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.checks import check_resize
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.resize_options import ResizeOptions
from resilio_hpc.launch.resize.keeper import ResizeKeeper, command
from tests.support.waiting import until

NOTES = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); "


def started(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def gone(pid: int) -> bool:
    """Ended, whether or not anybody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_that_fails_is_started_again_and_one_that_says_that_the_run_is_over_is_not(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    code = NOTES + "sys.exit(0 if len(open(sys.argv[1]).readlines()) == 3 else 1)"
    keeper = ResizeKeeper([sys.executable, "-c", code, str(notes)], first_pause_s=0.05)
    keeper.start()
    until(lambda: not keeper._thread.is_alive(), "the keeper's end")
    assert len(started(notes)) == 3


def test_a_killed_one_is_started_again_until_the_launch_closes_which_waits_for_nothing(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    code = NOTES + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    keeper = ResizeKeeper([sys.executable, "-c", code, str(notes)], first_pause_s=0.05)
    keeper.start()
    until(lambda: len(started(notes)) == 1, "a resizer")
    os.kill(started(notes)[0], signal.SIGKILL)
    until(lambda: len(started(notes)) == 2, "another resizer")
    keeper.close()
    until(lambda: gone(started(notes)[1]) and not keeper._thread.is_alive(), "the end of both")
    assert len(started(notes)) == 2


def test_what_cannot_be_started_ends_no_launch(tmp_path: Path) -> None:
    keeper = ResizeKeeper([str(tmp_path / "missing")], first_pause_s=600.0)
    keeper.start()
    keeper.close()
    until(lambda: not keeper._thread.is_alive(), "the keeper's end")


def test_it_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    resizer = (
        "import os; from resilio_hpc.launch.process import process_tree; "
        "process_tree.die_with_parent(int(sys.argv[2])); "
    )
    code = "import sys; " + resizer + NOTES + "time.sleep(600)"
    launcher = (
        "import os, sys, time; from resilio_hpc.launch.resize.keeper import ResizeKeeper; "
        f"ResizeKeeper([sys.executable, '-c', {code!r}, sys.argv[1], str(os.getpid())]).start(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, str(notes)]) as process:
        until(lambda: len(started(notes)) == 1, "a resizer")
        process.kill()
    until(lambda: gone(started(notes)[0]), "the resizer's end")


def options(**changes: object) -> LaunchOptions:
    return LaunchOptions(script="x.py", kind="script", run_dir="/tmp", **changes)  # type: ignore[arg-type]


def test_the_command_is_that_of_a_person_and_only_looks_where_the_launch_does(tmp_path: Path) -> None:
    launcher = f"--launcher={os.getpid()}"
    assert command(options(), tmp_path)[-3:] == (str(tmp_path), "--gpus", launcher)
    resizing = ResizeOptions(resize_policy="/my policy.toml", resize_options=("--max-nodes", "16"))
    more = options(mode="checkpoint", resizing=resizing)
    told = (launcher, "--policy=/my policy.toml", "--observe", "--max-nodes", "16")
    assert command(more, tmp_path)[-5:] == told


def test_a_size_that_cannot_change_and_a_policy_that_cannot_be_read_are_told_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"--nnodes 4 there is nothing to resize: write --nnodes MIN:MAX"):
        check_resize(options(min_nodes=4, max_nodes=4))
    with pytest.raises(UsageError, match=r"/nowhere/p.toml: No such file"):
        check_resize(options(max_nodes=4, resizing=ResizeOptions(resize_policy="/nowhere/p.toml")))
    check_resize(options(max_nodes=4))
