"""Several processes save and load with torch.distributed.checkpoint: layouts, accidents, saves in the background."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt import catalogue, verify
from resilio_hpc.core.process import run
from tests.support.environments import SUPPORT, scrubbed


def play(script: str, *arguments: str | Path) -> tuple[int | None, str]:
    """Exit code and the end of what it says."""
    argv = [sys.executable, str(SUPPORT / "ckpt" / f"{script}.py"), *map(str, arguments)]
    done = run(argv, 240, env=scrubbed(), check=False)
    return done.returncode, done.stderr[-4000:]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir()
    return made


@pytest.fixture
def small_disk(checkpoints: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(checkpoints)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here")
    yield checkpoints
    subprocess.run(["umount", str(checkpoints)], check=True)


@pytest.mark.slow
def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    code, said = play("dcp_layouts", tmp_path)
    assert code == 0, said


@pytest.mark.parametrize("what", ["value", "unwritable"])
def test_one_process_that_fails_makes_all_fail_and_nothing_is_committed(what: str, checkpoints: Path) -> None:
    code, said = play("dcp_failures", what, checkpoints)
    assert code == 0, said
    for manifest in catalogue.committed(checkpoints):
        assert verify.verify_step(checkpoints, manifest) == []


def test_a_full_disk_makes_the_save_fail_and_the_next_one_finds_its_room_again(small_disk: Path) -> None:
    code, said = play("dcp_failures", "disk", small_disk)
    assert code == 0, said


@pytest.mark.slow
def test_a_process_killed_in_the_middle_leaves_nothing_that_the_next_save_minds(checkpoints: Path) -> None:
    assert play("dcp_failures", "killed", checkpoints)[0] == 1
    assert catalogue.committed_steps(checkpoints) == [1]
    (left,) = [path for path in checkpoints.iterdir() if path.name.startswith(".staging")]
    (left / "node-9.h5").write_bytes(b"of a larger world that died here")
    code, said = play("dcp_failures", "none", checkpoints)
    assert code == 0, said
    files = sorted(path.name for path in catalogue.step_directory(checkpoints, 2).iterdir())
    assert files == ["manifest.json", *(f"node-{rank}.h5" for rank in range(4))]


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_saves_in_the_background(kind: str, checkpoints: Path) -> None:
    code, said = play("dcp_failures", kind, checkpoints)
    assert code == 0, said
