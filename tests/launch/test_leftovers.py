"""What a killed launch leaves on a node is removed by a later one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.launch.rundir import stale_directories

HOLDER = """
import sys, time
from pathlib import Path
from resilio_hpc.launch.rundir.stale_directories import AgentLocks
held = AgentLocks([Path(sys.argv[1])])
held.tick()
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / f"resilio-{os.geteuid()}-0123456789ab"
    path.mkdir(mode=0o700)
    (path / "rank0.slot0").write_bytes(b"snapshot")
    return path


def test_what_a_living_agent_holds_stays_and_a_killed_agents_waits_for_its_successor(directory: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"held\n"
    assert stale_directories.sweep([directory.parent], abandoned_s=-1.0) == []
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    agent.stdout.close()
    assert stale_directories.sweep([directory.parent]) == []  # a successor may come
    os.utime(directory / stale_directories.LOCK, (time.time() - 400, time.time() - 400))
    assert stale_directories.sweep([directory.parent]) == [directory]
    assert not directory.exists()


def test_two_agents_cannot_hold_one_directory(directory: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    with pytest.raises(BlockingIOError):
        stale_directories.AgentLocks([directory])
    agent.kill()
    agent.wait()
    agent.stdout.close()
    stale_directories.AgentLocks([directory])


def test_links_and_other_names_are_never_touched(tmp_path: Path, directory: Path) -> None:
    (tmp_path / f"resilio-{os.geteuid()}-link").symlink_to(directory)
    (tmp_path / "resilio-data").mkdir()
    stale_directories.sweep([tmp_path], abandoned_s=-1.0)
    assert (tmp_path / "resilio-data").is_dir()
    assert (tmp_path / f"resilio-{os.geteuid()}-link").is_symlink()
