"""Arenas in a job with little memory: a real cgroup, whose limit kills whoever takes too much."""

from __future__ import annotations

import os
import subprocess
import sys
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
    checkpoint.save(step, state).wait("committed", 120)
print(*(slot.on_disk for slot in checkpoint._arenas._slots))
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
    argv = [sys.executable, "-c", SCRIPT, str(limited), str(tmp_path / "there"), str(tmp_path / "here"), str(size)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200)


def test_a_second_arena_that_would_be_too_much_goes_to_disk_and_nobody_is_killed(limited: Path, tmp_path: Path) -> None:
    done = run(limited, tmp_path, STATE)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
    assert "MiB of memory are left, and training needs some of them); one or both go to disk" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    step, state = Checkpointer(tmp_path / "there").restore() or (-1, None)
    assert step == 4 and (state["x"] == 4).all()


def test_what_fits_stays_in_memory(limited: Path, tmp_path: Path) -> None:
    done = run(limited, tmp_path, STATE // 3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")
