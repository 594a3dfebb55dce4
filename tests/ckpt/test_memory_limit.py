"""Arenas in a job with little memory: a real cgroup, whose limit kills whoever takes too much."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt import Checkpointer

LIMIT = 420 << 20
STATE = 150 << 20

SCRIPT = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
import numpy
from resilio_hpc.ckpt import Checkpointer
checkpoint = Checkpointer(sys.argv[2], local=sys.argv[3])
state = {"x": numpy.ones(int(sys.argv[4]), dtype=numpy.uint8)}
for step in range(1, 5):
    state["x"][:] = step
    handle = checkpoint.save(step, state)
    handle.wait("committed", 120) if not handle.error else None
print(*(slot.on_disk for slot in checkpoint._arenas.open()._slots))
"""


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Path]:
    """A memory cgroup with LIMIT, of whichever version there is."""
    mounted = Path("/sys/fs/cgroup")
    version_1 = (mounted / "memory").is_dir()
    directory = (mounted / "memory" if version_1 else mounted) / f"resilio-test-{os.getpid()}"
    try:
        directory.mkdir()
        (directory / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"may not make a memory cgroup: {error}")
    yield directory
    directory.rmdir()


def run(limited: Path, tmp_path: Path, size: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "here").mkdir()
    argv = [sys.executable, "-c", SCRIPT, str(limited), str(tmp_path / "there"), str(tmp_path / "here"), str(size)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200)


def test_a_second_arena_that_is_too_much_goes_to_disk_and_nobody_is_killed(limited: Path, disk_path: Path) -> None:
    done = run(limited, disk_path, STATE)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
    assert "MiB of memory are left, and training needs some of them); one or both go to disk" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    step, state = Checkpointer(disk_path / "there").restore() or (-1, None)
    assert step == 4 and (state["x"] == 4).all()


def test_where_the_disk_lies_in_memory_too_one_arena_takes_every_save(limited: Path, disk_path: Path) -> None:
    """Where the directory for what does not fit is a tmpfs, as many a /tmp is, one arena takes each save."""
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        argv = [sys.executable, "-c", SCRIPT, str(limited), str(disk_path / "there"), name, str(STATE)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("from step 2 on there is room for one snapshot alone (") == 1
    assert "MiB of memory are left, and training needs some of them" in done.stderr
    assert "is not saved" not in done.stderr
    step, state = Checkpointer(disk_path / "there").restore() or (-1, None)
    assert step == 4 and (state["x"] == 4).all()


def test_what_fits_stays_in_memory(limited: Path, disk_path: Path) -> None:
    done = run(limited, disk_path, STATE // 3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")
