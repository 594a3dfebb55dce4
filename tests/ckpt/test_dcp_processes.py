"""Several processes save and load with torch.distributed.checkpoint: layouts, accidents, saves in the background."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt.store import checkpoint_index, verify
from resilio_hpc.core.process import run
from tests.support.environments import SUPPORT, scrubbed
from tests.support.requirements import need_mounts
from tests.support.waiting import PATIENCE_S

QUICK = ("killed", "process")
SLOW = ("value", "unwritable", "disk", "thread")
slow = pytest.mark.slow


def play(script: str, *arguments: Path) -> tuple[int | None, str]:
    """Exit code and the end of what it says."""
    argv = [sys.executable, str(SUPPORT / "ckpt" / f"{script}.py"), *map(str, arguments)]
    done = run(argv, PATIENCE_S, env=scrubbed(), check=False)
    return done.returncode, done.stderr[-4000:]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a directory for each of QUICK, in which it has gone wrong."""
    yield from gone_wrong(tmp_path_factory.mktemp("failures"), QUICK)


@pytest.fixture(scope="module")
def slow_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for SLOW."""
    yield from gone_wrong(tmp_path_factory.mktemp("failures"), SLOW)


def gone_wrong(room: Path, kinds: tuple[str, ...]) -> Iterator[Path]:
    """One program does it all: torch is slow to import."""
    for kind in kinds:
        (room / kind).mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(room / "disk")]
    is_mounted = "disk" in kinds and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        code, said = play("dcp_failures", *(room / kind for kind in kinds if is_mounted or kind != "disk"))
        assert code == 0, said
        yield room
    finally:
        if is_mounted:
            subprocess.run(["umount", str(room / "disk")], check=True)


def ended(room: Path, kind: str) -> tuple[str, str]:
    """How the processes ended, "0" or "1", and the end of what they said."""
    return (room / f"code-{kind}").read_text(), (room / f"said-{kind}").read_text()[-4000:]


@pytest.mark.slow
def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    code, said = play("dcp_layouts", tmp_path)
    assert code == 0, said


@slow
def test_one_process_that_fails_makes_all_fail_and_nothing_is_committed(slow_room: Path) -> None:
    check_refused(slow_room, "value")


@slow
def test_one_that_may_not_write_makes_all_fail_and_nothing_is_committed(slow_room: Path) -> None:
    check_refused(slow_room, "unwritable")


def check_refused(room: Path, what: str) -> None:
    code, said = ended(room, what)
    assert code == "0", said
    for manifest in checkpoint_index.committed(room / what):
        assert verify.verify_step(room / what, manifest) == []


@slow
def test_a_full_disk_makes_the_save_fail_and_the_next_one_finds_its_room_again(slow_room: Path) -> None:
    need_mounts()
    code, said = ended(slow_room, "disk")
    assert code == "0", said


def test_a_process_killed_in_the_middle_leaves_nothing_that_the_next_save_minds(room: Path) -> None:
    """The next save is made in a copy, beside the file of a larger world that died there, too."""
    assert ended(room, "killed")[0] == "1"
    assert checkpoint_index.committed_steps(room / "killed") == [1]
    assert len(list((room / "killed").glob(".staging*"))) == 1
    code, said = ended(room, "none")
    assert code == "0", said
    files = sorted(path.name for path in checkpoint_index.step_directory(room / "none", 2).iterdir())
    assert files == ["manifest.json", *(f"node-{rank}.h5" for rank in range(4))]


def test_saves_in_the_background_of_a_process(room: Path) -> None:
    code, said = ended(room, "process")
    assert code == "0", said


@slow
def test_saves_in_the_background_of_a_thread(slow_room: Path) -> None:
    code, said = ended(slow_room, "thread")
    assert code == "0", said
