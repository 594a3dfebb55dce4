"""Under the real launcher: a shared file system that is full for a while, a node's disk that is full or read-only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.requirements import need_mounts
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import os
from pathlib import Path
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.core.errors import CheckpointError

run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
filler = run.checkpoint_dir / "filler"
state = {"x": np.zeros(200_000), "rank": run.rank}
assert checkpoint.restore(state) is None

def save(done):
    if done == 2 and run.rank == 0:
        room = os.statvfs(run.checkpoint_dir)
        filler.write_bytes(bytes(room.f_bavail * room.f_frsize))
    handle = checkpoint.save(done, state)
    if done == 2:
        try:
            handle.wait(timeout_s=300)
        except CheckpointError as error:
            print(f"rank {run.rank} heard: {error}", flush=True)
            assert checkpoint.steps() == [1]
        else:
            raise SystemExit("a save to a full disk was committed")
        if run.rank == 0:
            filler.unlink()
    else:
        handle.wait(timeout_s=300)

for step in run.steps(0, 4, save=save, every=1):
    state["x"] += 1
"""

MOUNT_AND = """
set -e
mount -t tmpfs -o size=24m,mode=755 none run/checkpoints
mount -t tmpfs -o "$DISK" none disk
"$@"
"$PYTHON" -m resilio_hpc.cli.main ckpt verify run/checkpoints
"""


@pytest.mark.parametrize(
    ("disk", "advice"),
    [
        pytest.param("ro", "Read-only file system: {}/disk", marks=pytest.mark.slow),
        ("size=64k", "{}/disk: make room there for two steps of this node"),
    ],
)
def test_a_full_shared_file_system_costs_a_save_a_bad_disk_none_and_training_goes_on(
    disk: str, advice: str, tmp_path: Path
) -> None:
    need_mounts()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    environment = scrubbed(RESILIO_LOCAL_NODES="2", PYTHON=sys.executable)
    done = subprocess.run(
        [
            *(
                "unshare",
                "--mount",
                "sh",
                "-c",
                MOUNT_AND,
                "sh",
            ),  # other processes do not see the mounts, which go with it
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--nproc-per-node", "1"),
            *("--local-checkpoints", "disk", "--no-torch", "--max-restarts", "0", "train.py"),
        ],
        cwd=tmp_path,
        env=environment | {"DISK": disk},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    said = done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} heard: step 2 was not saved (committed): no space left for " in said
    assert re.search("checkpoint of step 2 could not be written on local[01]: no space left for ", said)
    assert said.count(advice.format(tmp_path)) == 2, said  # once by each node
    assert [step for step in (1, 2, 3, 4) if f"step {step}: good" in said] == [1, 3, 4]
