"""What a killed launch leaves on a node is removed by a later one, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.launch.rundir import directory_locks, node_directories, stale_directories

HOLDER = """
import sys, time
from pathlib import Path
from resilio_hpc.launch.rundir.directory_locks import AgentLocks
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
    os.utime(directory / directory_locks.LOCK, (time.time() - 400, time.time() - 400))
    assert stale_directories.sweep([directory.parent]) == [directory]
    assert not directory.exists()


def test_two_agents_cannot_hold_one_directory(directory: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    with pytest.raises(BlockingIOError):
        directory_locks.AgentLocks([directory])
    agent.kill()
    agent.wait()
    agent.stdout.close()
    directory_locks.AgentLocks([directory])


def test_a_launch_whose_launcher_is_dead_need_not_be_waited_for(directory: Path) -> None:
    launcher = subprocess.Popen(["sleep", "1000"])
    claim = directory_locks.claim_of("0dbb", "n1", launcher.pid)
    for lock in directory_locks.AgentLocks([directory], claim=claim)._locks:
        os.close(lock)
    (kept,) = stale_directories.clean([directory.parent], 0.0)
    assert kept.kept == "its launcher lives" and (kept.claim.run_id, kept.claim.node) == ("0dbb", "n1")
    launcher.send_signal(signal.SIGSTOP)
    assert stale_directories.sweep([directory.parent], 0.0) == []  # it may be continued
    os.utime(directory / directory_locks.LOCK, (1, time.time() - 400))
    assert stale_directories.sweep([directory.parent]) == []  # it is only stopped, for however long
    launcher.kill()
    launcher.wait()
    assert stale_directories.sweep([directory.parent], 1000.0) == []
    assert stale_directories.clean([directory.parent], 0.0, dry_run=True)[0].kept == "" and directory.exists()
    assert stale_directories.sweep([directory.parent], 0.0) == [directory]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"launcher": 7}', b"\xff" * 100_000])
def test_a_lock_that_says_nothing_is_waited_for(damage: bytes, directory: Path) -> None:
    (directory / directory_locks.LOCK).write_bytes(damage)
    assert stale_directories.sweep([directory.parent], 0.0) == []
    os.utime(directory / directory_locks.LOCK, (1, time.time() - 400))
    assert stale_directories.sweep([directory.parent], 0.0) == [directory]


def test_one_in_use_keeps_the_others_of_its_launch(tmp_path: Path) -> None:
    label = node_directories.label_of("0dbb", "n1")
    paths = [tmp_path / f"resilio-{os.geteuid()}-{label}-{name}" for name in ("aaaa", "bbbb")]
    for path in paths:
        path.mkdir()
        (path / directory_locks.LOCK).touch()
        os.utime(path / directory_locks.LOCK, (1, time.time() - 400))
    locks = directory_locks.AgentLocks(paths[:1])
    (launch,) = stale_directories.clean([tmp_path])
    assert launch.kept == stale_directories.IN_USE and all(path.exists() for path in paths)
    os.close(locks._locks[0])
    os.utime(paths[0] / directory_locks.LOCK, (1, time.time() - 400))
    assert stale_directories.sweep([tmp_path]) == paths


def test_a_directory_that_is_removed_just_then_is_made_again(directory: Path) -> None:
    lock = os.open(directory / directory_locks.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    removed = directory.with_name(f"resilio-{os.geteuid()}-removed-1")
    directory.rename(removed)  # as a clean does, with the lock held
    with pytest.raises(FileNotFoundError):
        directory_locks.AgentLocks([directory])
    os.close(lock)
    removed.rename(directory)
    opened = os.open(directory / directory_locks.LOCK, os.O_RDWR)
    (directory / directory_locks.LOCK).unlink()
    assert not directory_locks.is_at(opened, directory / directory_locks.LOCK)
    os.close(opened)


def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    half = tmp_path / f"resilio-{os.geteuid()}-removed-01234567"
    half.mkdir()
    (half / "rank0.slot0").write_bytes(b"snapshot")  # its lock's file went first
    assert stale_directories.sweep([tmp_path]) == []
    os.utime(half, (1, time.time() - 400))
    assert stale_directories.sweep([tmp_path]) == [half]


def test_hostile_names_stay(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / directory_locks.LOCK).touch()
    name = f"resilio-{os.geteuid()}-0123456789ab-"
    (tmp_path / f"{name}file").write_text("x")
    os.mkfifo(tmp_path / f"{name}pipe")
    (tmp_path / f"{name}link").symlink_to(precious)
    for kind in ("linked lock", "folder", "pipe lock", "no lock"):
        (tmp_path / f"{name}{kind}").mkdir()
        (tmp_path / f"{name}{kind}" / "data").write_text("x")
    (tmp_path / f"{name}linked lock" / directory_locks.LOCK).symlink_to(precious / directory_locks.LOCK)
    (tmp_path / f"{name}folder" / directory_locks.LOCK).mkdir()
    os.mkfifo(tmp_path / f"{name}pipe lock" / directory_locks.LOCK)
    before = sorted(tmp_path.rglob("*"))
    for path in before:
        os.utime(path, (1, time.time() - 9000), follow_symlinks=False)
    launches = stale_directories.clean([tmp_path])
    assert all(one.kept for one in launches)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_and_other_names_are_never_touched(tmp_path: Path, directory: Path) -> None:
    (tmp_path / f"resilio-{os.geteuid()}-link").symlink_to(directory)
    (tmp_path / "resilio-data").mkdir()
    stale_directories.sweep([tmp_path], abandoned_s=-1.0)
    assert (tmp_path / "resilio-data").is_dir()
    assert (tmp_path / f"resilio-{os.geteuid()}-link").is_symlink()
