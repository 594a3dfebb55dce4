"""``resilio-launch --checkpoint-dir s3://…``: a killed rank, a second job of the run, another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.ckpt.store import checkpoint_index
from tests.support.ckpt.object_looks import url_of
from tests.support.ckpt.object_server import Proxy
from tests.support.ckpt.stores import Place
from tests.support.environments import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, Slab

run, total = train.attach(), int(sys.argv[1])
part = np.zeros(240_000 // run.world_size)
state = {"x": Slab(part, (240_000,), (len(part) * run.rank,)), "done": 0}
checkpoint = Checkpointer(run.checkpoint_dir)
start = 0
if (found := checkpoint.restore(state)) is not None:
    start, state = found
print("from", start, "of", run.world_size, flush=True)
assert (part == start).all()
for step in run.steps(start, total, save=checkpoint.saver(lambda: state), every=4):
    if step == 10 and "FAIL" in os.environ:
        while not checkpoint.steps():  # the first save has to import boto3, at low priority
            time.sleep(0.2)
        sys.exit(3)
    mark = Path(sys.argv[2])
    if step == 6 and run.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    part += 1
    time.sleep(0.3)
print("done", part[0], part[-1], flush=True)
"""


def _launch(run: Path, url: str, ranks: int, script: Path, code: int = 0, **more: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--nproc-per-node", str(ranks)),
            *("--run-dir", str(run), "--checkpoint-dir", url, "--keep-checkpoints", "2"),
            *(str(script), "16", str(run.with_name("killed"))),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **more},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_goes_on_from_the_store_after_a_kill_and_in_another_job(
    place: Place, proxy: Proxy, tmp_path: Path
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    said = _launch(run, url_of(place), 2, script, 1, FAIL="yes")
    assert "killed by SIGKILL" in said
    assert (run / "checkpoints").is_symlink()
    last = checkpoint_index.committed_steps(place.directory)[-1]
    assert 4 <= last <= 10
    assert checkpoint_index.committed_steps(run / "checkpoints")[-1] == last
    said = _launch(run, url_of(place), 3, script)  # another world: each rank reads its part
    assert f"from {last} of 3" in said
    assert said.count("done 16.0 16.0") == 3
    steps = checkpoint_index.committed_steps(place.directory)
    assert steps[-1] == 16
    assert len(steps) == 2
    why = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.main", "why", str(run)], cwd=ROOT, capture_output=True, text=True
    )
    assert "step 16" in " ".join(why.stdout.split())
    said = _launch(run, f"{url_of(place)}-other", 2, script, code=2)
    assert f"keeps its checkpoints in {url_of(place)}" in said
    said = _launch(tmp_path / "new", "s3://no-such-bucket/x", 2, script, code=2)
    assert "there is no such bucket" in said
