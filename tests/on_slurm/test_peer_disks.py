"""Checkpoints on the nodes' own disks, on a real Slurm: the next job reads them there, each other's and in another
layout."""

from __future__ import annotations

import sys
from pathlib import Path

from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.ckpt.local_node import lose_tensors

NODES = 3
SCRIPT = """
import os
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, Slab

SHAPE = (600, 600)
run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
share = SHAPE[0] // run.world_size
by_rows = os.environ["LAYOUT"] == "rows"
shape, start = ((share, SHAPE[1]), (share * run.rank, 0)) if by_rows else ((SHAPE[0], share), (0, share * run.rank))
mine = Slab(np.zeros(shape), SHAPE, start)
row, column = np.ogrid[start[0]:start[0] + shape[0], start[1]:start[1] + shape[1]]
begin, _ = checkpoint.restore({"grid": mine}) or (0, None)
assert (mine.tensor == begin * (1 + row + SHAPE[0] * column)).all(), begin

def save(done):
    checkpoint.save(done, {"grid": mine}).wait(timeout_s=60)

for step in run.steps(begin, begin + 3, save=save, every=1):
    mine.tensor[:] += 1 + row + SHAPE[0] * column
    if step + 1 == begin + 2:
        save(begin + 2)
        raise SystemExit(3)  # so that the run is not complete
"""


def launch(cluster: DevCluster, layout: str, nodes: int = NODES) -> str:
    """Two more steps, and a failure; what it printed."""
    launcher, output = Path(sys.executable).with_name("resilio-launch"), cluster.shared / f"peer-disks-{layout}.txt"
    job = cluster.submit(
        f"#!/bin/bash\n#SBATCH --nodes={nodes} --no-kill --time=5 --job-name=disks\n"
        f"#SBATCH --output=/shared/{output.name}\nexport LAYOUT={layout}\n"
        f"exec {launcher} --nproc-per-node=1 --run-dir=/shared/peer-disks --local-checkpoints=/nvme --no-torch "
        "--max-restarts=0 /shared/peer-disks.py\n"
    )
    cluster.wait_for_job(job, ["COMPLETED", "FAILED"], timeout_s=120.0)
    return output.read_text()


def test_the_next_job_reads_its_parts_from_the_disks_that_they_went_by(cluster: DevCluster) -> None:
    cluster = cluster
    (cluster.shared / "peer-disks.py").write_text(SCRIPT)
    said = launch(cluster, "rows")
    checkpoints = cluster.shared / "peer-disks" / "checkpoints"
    assert [manifest.step for manifest in checkpoint_index.committed(checkpoints)] == [1, 2], said
    manifest = checkpoint_index.committed(checkpoints)[-1]
    assert {shard.node for shard in manifest.shards} == {f"n{number}" for number in range(1, NODES + 1)}
    lose_tensors(checkpoints, manifest)
    said = launch(cluster, "columns")
    firsts = [event.fields for event in events_of(cluster.shared / "peer-disks") if event.kind == "first_step"]
    assert (firsts[-1]["restored"], firsts[-1]["source"]) == (2, "peer"), said
    assert checkpoint_index.committed(checkpoints)[-1].step == 4
