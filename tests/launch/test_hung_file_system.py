"""Under the real launcher: the shared file system, with the run directory, hangs for a while.

It is a disk of its own that is frozen: whoever writes to it waits in the kernel, where no signal ends it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.requirements import need_mounts, need_program
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import os, time
from pathlib import Path
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
state = {"x": np.zeros(200_000), "rank": run.rank}
assert checkpoint.restore(state) is None
frozen, thaw, go_on = Path("frozen"), Path("thaw"), Path("go on")

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def save(done):
    state["x"][:] = done
    handle = checkpoint.save(done, state)
    if done == 2 and run.rank == 0:
        handle.wait(timeout_s=120)
        Path("freeze").touch()
    if done == 2:
        wait_for(frozen)
    if done == 6:
        Path(f"trained on {run.rank}").touch()
        assert not thaw.exists()
        wait_for(go_on)
        handle.wait(timeout_s=120)

for step in run.steps(0, 7, save=save, every=1):
    time.sleep(0.05)
"""

MOUNT_AND = """
mount -o loop disk shared || exit 77
mkdir shared/run
(
    waits=0
    late() { sleep 0.1; waits=$((waits + 1)); [ $waits -gt 3000 ]; }
    until [ -e freeze ] || late; do :; done
    fsfreeze --freeze shared && touch frozen
    until [ -e "trained on 0" ] && [ -e "trained on 1" ] || [ -e thaw ] || late; do :; done
    ls shared/run/checkpoints > "seen while it hung"
    sleep "$HANGS_S"
    touch thaw
    fsfreeze --unfreeze shared
    touch "go on"
) &
"$@"
code=$?
touch freeze thaw
wait
cd shared/run
"$PYTHON" -c 'import sys; from resilio_hpc.cli.ckpt.ckpt import main; sys.exit(main(sys.argv[1:]))' verify checkpoints
cd ../..
umount shared
exit $code
"""


def make_disk(path: Path) -> None:
    """A file with a file system, which is mounted in a namespace of its own and goes with it."""
    need_mounts()
    need_program("mkfs.ext4", "fsfreeze")
    with (path / "disk").open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "disk"], cwd=path, check=True, timeout=60)
    (path / "shared").mkdir()


@pytest.mark.parametrize("hangs_s", [0, pytest.param(65, marks=pytest.mark.slow)])
def test_training_goes_on_while_the_shared_file_system_hangs(hangs_s: int, tmp_path: Path) -> None:
    make_disk(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = scrubbed(RESILIO_LOCAL_NODES="2", PYTHON=sys.executable)
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", MOUNT_AND, "sh"),
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "shared/run"),
            *("--nproc-per-node", "1", "--no-torch", "--max-restarts", "0", "train.py"),
        ],
        cwd=tmp_path,
        env=environment | {"HANGS_S": str(hangs_s)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode == 77:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "round 1" not in said  # nobody was taken for dead
    seen = (tmp_path / "seen while it hung").read_text().split()
    assert {"step-0000000001", "step-0000000002"} <= set(seen)
    assert "step-0000000006" not in seen
    assert [step for step in (1, 2, 6, 7) if f"step {step}: good" in said][-2:] == [6, 7]
    assert ("is on its way to disk for" in said) == (hangs_s > 60)
    assert ("saves go on again" in said) == (hangs_s > 60)
