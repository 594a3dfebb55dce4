"""Several processes without our launcher: each writes its part, rank 0 commits."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.coordination.world import session
from resilio_hpc.ckpt.store import checkpoint_index
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

SAVE = """
    import os, sys
    import numpy as np
    from resilio_hpc import ckpt
    rank, directory = int(os.environ["RANK"]), sys.argv[1]
    saver = ckpt.Checkpointer(directory)
    found = saver.restore()
    first = 0 if found is None else found[0]
    if found is not None:
        assert found[1] == {"rank": rank, "step": first}, found
    for step in range(first + 1, first + 4):
        handle = saver.save(step, {"rank": rank, "step": step})
    handle.wait(timeout_s=300)
    print(saver.steps())
"""


def start(directory: Path, code: str, world: int, rank: int) -> subprocess.Popen[str]:
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    environment = scrubbed(**{name: str(number) for name, number in numbers.items()})
    argv = [sys.executable, "-c", textwrap.dedent(code), str(directory)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_all(directory: Path, code: str, world: int = 3) -> list[tuple[int, str, str]]:
    processes = [start(directory, code, world, rank) for rank in range(world)]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_all_processes_save_together_and_a_second_start_goes_on(tmp_path: Path) -> None:
    for expected in ([1, 2, 3], [4, 5, 6]):
        for rank, (code, out, err) in enumerate(run_all(tmp_path, SAVE)):
            assert code == 0, err
            found = json.loads(out)
            assert found[-3:] == expected
            assert rank or found == expected  # rank 0 removes old ones, just after the others see the new one
    assert sorted(path.name for path in (tmp_path / "step-0000000006").iterdir()) == [
        "manifest.json",
        "node-0.h5",
        "node-1.h5",
        "node-2.h5",
    ]


def test_the_note_of_a_process_that_died_in_a_former_start_is_not_believed(tmp_path: Path) -> None:
    """Rank 1 wrote its part of step 1 and everything ended; in the next start only rank 0 comes so far."""
    alone = start(tmp_path, SAVE.replace("timeout_s=300", "timeout_s=1000"), 2, 1)
    note = ".staging-step-0000000001-*/.shard-1.json"
    until(lambda: list(tmp_path.glob(note)), "its part is written", alive=lambda: alone.poll() is None)
    alone.kill()
    alone.communicate()
    code = SAVE.replace("range(first + 1, first + 4)", "[1]").replace("timeout_s=300", "timeout_s=0.5")
    again = subprocess.Popen([sys.executable, "-c", OTHER_PARENT, textwrap.dedent(code), str(tmp_path)])
    assert again.wait(PATIENCE_S) == 1  # it waited for rank 1 in vain
    assert checkpoint_index.committed_steps(tmp_path) == []


OTHER_PARENT = """
import os, subprocess, sys
environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
code = sys.argv[1].replace("handle.wait", "import threading; os_exit = os._exit\\ntry: handle.wait").replace(
    "print(saver.steps())", "except TimeoutError: os_exit(1)")
sys.exit(subprocess.run([sys.executable, "-c", code, sys.argv[2]], env=environment).returncode)
"""


def test_a_damaged_part_stops_a_restore_of_many_rather_than_mixing_steps(tmp_path: Path) -> None:
    run_all(tmp_path, SAVE, 2)
    shard = tmp_path / "step-0000000003" / "node-1.h5"
    data = bytearray(shard.read_bytes())
    data[data.index(b'"rank":1')] ^= 1
    shard.write_bytes(data)
    process = start(tmp_path, SAVE, 2, 1)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "CorruptCheckpoint: step 3" in err
    assert "remove" in err


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"RANK": "x"}, (0, 1)),
    ],
)
def test_the_place_is_read_from_whoever_started_us(environment: dict[str, str], place: tuple[int, int]) -> None:
    found = Place.read(environment)
    assert (found.rank, found.world_size) == place


def test_a_session_is_the_same_for_all_ranks_and_another_after_a_restart() -> None:
    def of(rank: int, restarts: int) -> str:
        environment = {"MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        return session(environment, Place(rank, rank, 2, 2, restarts, ""))

    assert of(0, 0) == of(1, 0)
    assert of(0, 0) != of(0, 1)
