"""Files that are the old or the new one, whole, whatever dies in between."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from resilio_hpc.core.durable import create_exclusive, exchange, make_directory, write_atomic
from tests.support.waiting import PATIENCE_S, until

REWRITE = """
import sys, itertools
from pathlib import Path
from resilio_hpc.core.durable import write_atomic
for n in itertools.count():
    write_atomic(Path(sys.argv[1]), bytes([65 + n % 26]) * 200_000)
"""


def kill_while_it_writes(target: Path) -> None:
    before = target.stat().st_ino
    process = subprocess.Popen([sys.executable, "-c", REWRITE, str(target)])
    until(lambda: target.stat().st_ino != before, "a write", alive=lambda: process.poll() is None, poll_s=0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_kill_9_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomic(target, b"0" * 200_000)
    for _ in range(3):
        kill_while_it_writes(target)
        data = target.read_bytes()
        assert len(data) == 200_000
        assert len(set(data)) == 1


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    target.mkdir()
    (target / "inhabitant").touch()
    try:
        write_atomic(target, b"x")
    except OSError:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


def test_a_creation_whose_answer_was_lost_is_known_by_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client repeats a link(2) that was not answered, and the server then says that the name exists."""
    link = os.link

    def answered_late(source: str, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", answered_late)
    assert create_exclusive(tmp_path / "epoch.1", b"ours") is True
    monkeypatch.undo()
    assert create_exclusive(tmp_path / "epoch.1", b"theirs") is False
    assert (tmp_path / "epoch.1").read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["epoch.1"]


def test_mode_and_content(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    write_atomic(target, b"new", 0o600)
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o600)
    assert create_exclusive(target, b"other") is False
    assert target.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def _race(path: str, start: Barrier, results: multiprocessing.Queue[tuple[int, list[int]]]) -> None:
    start.wait(PATIENCE_S)
    won = [n for n in range(20) if create_exclusive(Path(path) / f"epoch.{n}", str(os.getpid()).encode())]
    results.put((os.getpid(), won))


def test_of_eight_racing_processes_one_creates_each_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[int, list[int]]] = context.Queue()
    start = context.Barrier(8)
    processes = [context.Process(target=_race, args=(str(tmp_path), start, results)) for _ in range(8)]
    for process in processes:
        process.start()
    won = [results.get(timeout=PATIENCE_S) for _ in processes]
    for process in processes:
        process.join(PATIENCE_S)
    assert sorted(n for _, numbers in won for n in numbers) == list(range(20))
    for pid, numbers in won:
        assert all((tmp_path / f"epoch.{n}").read_text() == str(pid) for n in numbers)
    assert len(list(tmp_path.iterdir())) == 20


def test_two_directories_change_places_at_once(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "none")


def test_directories_are_made_with_those_above_them(tmp_path: Path) -> None:
    for _ in range(2):
        make_directory(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_directory(tmp_path / "file" / "d")
