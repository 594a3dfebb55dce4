"""One real run with two ranks, snapshots and a committed checkpoint, that goes on while others look at it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from resilio_hpc.launch.rundir import node_directories, run_directory
from tests.support.environments import open_the_way_to, scrubbed
from tests.support.security.live_run import Running
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
weights = np.arange(1000.0)
for step in run.steps(0, 1 << 40, save=lambda step: checkpoint.save(step, {"weights": weights}), every=20):
    print("step", step, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The run, committed at least once."""
    folder = tmp_path_factory.mktemp("seen by others")
    open_the_way_to(folder)  # what is closed shall be so by itself
    (folder / "train.py").write_text(SCRIPT)
    path = folder / "run"
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--standalone",
            "--nproc-per-node", "2", "--run-dir", str(path), "train.py"]  # fmt: skip
    with (folder / "out").open("wb") as out:
        launch = subprocess.Popen(
            argv, cwd=folder, stdout=out, stderr=out, start_new_session=True,
            env=scrubbed(),
        )  # fmt: skip
    try:
        until(
            lambda: list((path / "checkpoints").rglob("manifest*")),
            "a committed checkpoint",
            lambda: (folder / "out").read_text(errors="replace"),
            alive=lambda: launch.poll() is None,
        )
        run = run_directory.read_run(path)
        local = node_directories.found(run.run_id, socket.gethostname().split(".")[0])
        assert local[0] is not None and local[1] is not None
        yield Running(path, run.secret, launch.pid, (local[0], local[1]))
    finally:
        launch.terminate()
        launch.wait(PATIENCE_S)
