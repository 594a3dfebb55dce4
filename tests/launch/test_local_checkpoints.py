"""Checkpoints by way of the nodes' own disks, under the real launcher: three runs that go on, in the tests' order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.events.event_text import words
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
state = {"x": np.zeros(50_000), "rank": run.rank}
start, _ = checkpoint.restore(state) or (0, None)
assert (state["x"] == start).all() and state["rank"] == run.rank, (start, state)

def save(done):
    handle = checkpoint.save(done, state)
    handle.wait("local", timeout_s=60)
    handle.wait(timeout_s=60)

for step in run.steps(start, start + 4, save=save, every=1):
    state["x"] += 1
    if step + 1 == start + 3:
        save(start + 3)
        raise SystemExit(3)  # so that the run is not complete
"""


class Launch:
    """Two nodes of two ranks each, played by this machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.disk = path, path / "disk"
        self.disk.mkdir()
        (path / "train.py").write_text(SCRIPT)

    def run(self) -> str:
        """Three more steps, and a failure; what it printed."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--nproc-per-node", "2"),
                *("--local-checkpoints", "disk", "--no-torch", "--max-restarts", "0", "train.py"),
            ],
            cwd=self.path,
            env=scrubbed(RESILIO_LOCAL_NODES="2"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 1, done.stderr[-3000:]
        return done.stderr

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_ledger(self.path / "run" / "ledger") if event.kind == kind]

    def restored(self) -> tuple[object, object]:
        """By the newest round: the step, and from where."""
        first = self.events("first_step")[-1].fields
        return first["restored"], first["source"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One run has ended."""
    launch = Launch(tmp_path_factory.mktemp("launch"))
    launch.run()
    return launch


@pytest.fixture(scope="module")
def second(first: Launch) -> Launch:
    """And another one, to which the shared file system gives no data."""
    for path in (first.path / "run" / "checkpoints" / "step-0000000003").glob("*.h5"):
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)  # whoever reads here fails
    one, other = sorted(first.disk.iterdir())  # of a node each: the next job's nodes come in the other order
    one.rename(first.disk / "exchanged")
    other.rename(one)
    (first.disk / "exchanged").rename(other)
    first.run()
    return first


def test_a_run_leaves_its_steps_on_the_nodes_own_disks(first: Launch) -> None:
    told = {(event.fields["node"], event.fields["step"]) for event in first.events("local")}
    nodes = {node for node, _ in told}
    assert len(nodes) == 2
    assert {(node, 3) for node in nodes} <= told
    assert not (first.path / "run" / "checkpoints" / ".worn").exists()


def test_the_next_run_reads_what_was_committed_from_the_nodes_own_disks(second: Launch) -> None:
    assert second.restored() == (3, "local")
    nodes = {event.fields["node"] for event in second.events("local")}
    assert len(nodes) == 2
    assert {(event.fields["node"], event.fields["step"]) for event in second.events("read_ahead")} == {
        (node, 3) for node in nodes
    }


def test_each_node_gets_the_ranks_whose_state_its_own_disk_has(second: Launch) -> None:
    before, after = (event.fields["members"] for event in second.events("round"))
    assert after == before[::-1]
    (placed,) = second.events("placed")
    assert placed.fields["places"] == {node: place for place, node in enumerate(after)}
    assert words("placed", placed.fields).endswith("their disks have step 3 of those ranks")


@pytest.mark.slow
def test_a_run_without_that_disk_reads_the_shared_file_system_and_says_so(second: Launch) -> None:
    shutil.rmtree(second.disk)
    said = second.run()
    assert second.restored() == (6, "committed")
    assert said.count(f"No such file or directory: {second.disk}: make that directory, on every node") == 2
    assert {event.fields["step"] for event in second.events("local_failed")} >= {9}
