"""Somebody else was there first: a directory, a file or a link in /tmp and /dev/shm that bears our name."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.errors import Untrusted, UsageError
from resilio_hpc.launch.rundir import directory_locks, node_directories, run_directory, stale_directories
from tests.support.security.another_user import NOBODY, as_another_user, needs_root
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory like /tmp, with a short name, as the path of a socket in it has at most 107 bytes."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o1777)
    for path in tmp_path.parents:
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    yield place
    shutil.rmtree(place)


PREPARED: dict[str, Callable[[Path, Path], None]] = {
    "a directory": lambda path, _target: path.mkdir(mode=0o777),
    "a link to a directory of the victim": lambda path, target: path.symlink_to(target),
    "a link to nowhere": lambda path, target: path.symlink_to(target / "missing"),
    "a file": lambda path, _target: path.write_text(""),
    "a pipe": lambda path, _target: os.mkfifo(path),
}


@pytest.fixture
def base(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a node's private directories are made."""
    monkeypatch.setenv("RESILIO_LOCAL_DIR", str(public))
    return public


@needs_root
@pytest.mark.parametrize("what", PREPARED)
def test_a_place_that_somebody_else_prepared_is_passed_over(what: str, base: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir(mode=0o755)
    seen = node_directories.local("run", "n1")  # its name can be seen by everybody, and the next job's is like it
    seen.rmdir()
    as_another_user(lambda: PREPARED[what](seen, target))
    assert seen.lstat().st_uid == NOBODY
    made = node_directories.local("run", "n1")
    assert made != seen
    assert (made.lstat().st_uid, made.lstat().st_mode & 0o7777) == (os.geteuid(), 0o700)
    assert node_directories.local("run", "n1") == made  # an agent that is started again finds it
    assert list(target.iterdir()) == []
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_link_of_our_own_is_passed_over_too(base: Path, tmp_path: Path) -> None:
    seen = node_directories.local("run", "n1")
    seen.rmdir()
    seen.symlink_to(tmp_path)
    assert node_directories.local("run", "n1") != seen


def test_a_directory_of_ours_that_was_open_is_closed(base: Path) -> None:
    made = node_directories.local("run", "n1")
    made.chmod(0o777)
    assert node_directories.local("run", "n1") == made
    assert made.stat().st_mode & 0o777 == 0o700


def _settle(barrier: multiprocessing.synchronize.Barrier, results: multiprocessing.Queue[str]) -> None:
    barrier.wait()
    results.put(str(node_directories.local("run", "n1")))


def test_agents_that_look_at_once_take_the_same_directory(base: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=_settle, args=(barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=PATIENCE_S) for _ in processes}) == 1
    for process in processes:
        process.join()
    assert len(list(base.iterdir())) == 1


def test_another_users_lock_holds_nobody_up_for_long(base: Path) -> None:
    held = os.open(base, os.O_RDONLY)  # which every user may
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert node_directories.local("run", "n1").is_dir()
    finally:
        os.close(held)


@needs_root
def test_a_base_where_others_rename_our_directories_is_refused(base: Path) -> None:
    base.chmod(0o777)
    with pytest.raises(Untrusted, match="RESILIO_LOCAL_DIR to a directory of your own"):
        node_directories.local("run", "n1")
    base.chmod(0o1777)
    os.chown(base, NOBODY, NOBODY)
    with pytest.raises(Untrusted, match="RESILIO_LOCAL_DIR to a directory of your own"):
        node_directories.local("run", "n1")


@needs_root
def test_what_somebody_else_left_under_our_name_is_not_swept(public: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    name = f"resilio-{os.geteuid()}"

    def plant() -> None:
        (public / f"{name}-1").mkdir()
        (public / f"{name}-1" / "link").symlink_to(precious)
        (public / f"{name}-2").symlink_to(precious)
        for planted in (public / f"{name}-1", public / f"{name}-2"):
            os.utime(planted, (1, 1), follow_symlinks=False)

    as_another_user(plant)
    assert stale_directories.sweep([public], 0.0) == []
    stale_directories.remove(public / f"{name}-1")
    stale_directories.remove(public / f"{name}-2")
    assert (precious / "file").read_text() == "x"
    assert (public / f"{name}-1" / "link").is_symlink()


def test_sweeping_our_own_follows_no_link(public: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    ours = public / f"resilio-{os.geteuid()}-1"
    ours.mkdir()
    (ours / "link").symlink_to(tmp_path / "precious")
    (ours / "folder").symlink_to(tmp_path)
    os.utime(ours, (1, time.time() - 1000))
    assert stale_directories.sweep([public], 10.0) == []  # no launch has locked it: it may be anything
    (ours / directory_locks.LOCK).touch(mode=0o600)
    os.utime(ours / directory_locks.LOCK, (1, time.time() - 1000))
    assert stale_directories.sweep([public], 10.0) == [ours]
    assert list(public.iterdir()) == []
    assert (tmp_path / "precious").read_text() == "x"


@needs_root
def test_a_secret_that_is_somebody_elses_or_open_is_refused(public: Path) -> None:
    run_directory.open_run(public / "run")
    secret = public / "run" / "secret"
    secret.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        run_directory.read_run(public / "run")
    secret.chmod(0o600)
    os.chown(secret, NOBODY, NOBODY)
    with pytest.raises(Untrusted, match="secret belongs to user"):
        run_directory.read_run(public / "run")
