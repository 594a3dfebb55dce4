"""Under the real launcher: shared memory and the disk behind it have room for one snapshot of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from resilio_hpc.core.ledger import Event, read_ledger
from tests.support.environments import scrubbed
from tests.support.requirements import need_mounts
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

def x_of(step):
    return np.random.default_rng(step).random(1_800_000)

run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
state = {"x": np.zeros(1_800_000), "rng": b""}
start, _ = checkpoint.restore(state) or (0, None)
if start:
    assert start == 4 and state["x"].tobytes() == x_of(4).tobytes() and state["rng"] == b"4"

def save(done):
    checkpoint.save(done, state).wait("committed", timeout_s=120)

for step in run.steps(start, 6, save=save, every=1):
    if start == 0 and step == 4:
        raise ValueError("a fault after step 4")
    state["x"][:], state["rng"] = x_of(step + 1), b"%d" % (step + 1)
"""

TWO_RANKS = """
import time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

def x_of(step):
    return np.random.default_rng(step).random(1_800_000)

run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
state = {"x": np.zeros(1_800_000), "rng": b""}
start, _ = checkpoint.restore(state) or (0, None)
if start:
    print(f"restored {start}", flush=True)
    assert state["x"].tobytes() == x_of(start).tobytes() and state["rng"] == b"%d of %d" % (start, run.rank)

def together(what):
    (run.checkpoint_dir / f"{what}-{run.rank}").touch()
    while not all((run.checkpoint_dir / f"{what}-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.01)

def save(done):
    together(f"{start}-{done}")
    handle = checkpoint.save(done, state)
    if handle.error:
        (run.checkpoint_dir / f"{start}-{done}-failed").touch()
    together(f"{start}-{done}-saved")
    if not (run.checkpoint_dir / f"{start}-{done}-failed").exists():
        handle.wait("committed", timeout_s=60)

for step in run.steps(start, 12, save=save, every=1):
    if start == 0 and step == 8 and run.rank == 0:
        raise ValueError("a fault after step 8")
    state["x"][:], state["rng"] = x_of(step + 1), b"%d of %d" % (step + 1, run.rank)
"""

MOUNT_AND = """
set -e
mount -t tmpfs -o size=24m,mode=1777 none /dev/shm
mount -t tmpfs -o size=10m,mode=1777 none spill
TMPDIR="$PWD/spill" "$@"
"""


def launch(tmp_path: Path, script: str, ranks: int) -> tuple[str, list[Event]]:
    """What a run of one node said, and its ledger."""
    need_mounts()
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "spill").mkdir()
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", MOUNT_AND, "sh"),
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-torch"),
            *("--nproc-per-node", str(ranks), "--max-restarts", "1", "train.py"),
        ],
        cwd=tmp_path, env=scrubbed(RESILIO_LOCAL_NODES="1"), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    said = done.stderr[-4000:] + done.stdout[-2000:]
    assert done.returncode == 0, said
    return said, [*read_ledger(tmp_path / "run" / "ledger")]


def test_a_run_goes_on_from_the_only_snapshot_and_the_ledger_has_why_there_is_one(tmp_path: Path) -> None:
    said, events = launch(tmp_path, SCRIPT, 1)
    rooms = [(one.fields["step"], one.fields["room"]) for one in events if one.kind == "snapshot_room"]
    assert rooms == [(2, "one"), (5, "one")]  # of each life
    assert [one.fields["step"] for one in events if one.kind == "committed"] == [1, 2, 3, 4, 5, 6]
    first = [one.fields for one in events if one.kind == "first_step"][-1]
    assert (first["restored"], first["source"]) == (4, "memory")
    assert "from step 2 on there is room for one snapshot alone (No space left on device" in said


def test_ranks_with_the_same_tensors_go_on_from_one_whole_snapshot_and_what_is_each_ones_own(tmp_path: Path) -> None:
    """Whichever rank gets the room first: rank 0 has it in the end, since its tensors go to disk."""
    said, events = launch(tmp_path, TWO_RANKS, 2)
    rooms = [one.fields for one in events if one.kind == "snapshot_room" and one.fields["step"] <= 8]
    assert "reduced" in {one["room"] for one in rooms if one["rank"] == 1}, said
    first = [one.fields for one in events if one.kind == "first_step"][-1]
    assert (first["restored"], first["source"]) == (8, "memory")
    assert "from step" in said and "on its snapshots leave out what other ranks of this node have in theirs" in said
    assert {one.fields["step"] for one in events if one.kind == "committed"} >= {12}
