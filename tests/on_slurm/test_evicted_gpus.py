"""A GPU of a node goes bad while a job trains: root's checks find it, and the next round does without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.prolog_epilog.hooks.hook_files import package_folder
from tests.support.environments import ROOT
from tests.support.waiting import until

BAD = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"
HEALTH = "/run/resilio/health"
# What root's checks ask on the node: the fake NVML, whose second GPU has uncorrected memory errors.
PYNVML = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.prolog_epilog.fake_nvml import FakeNvml
_nvml = FakeNvml({{"nvmlDeviceGetTotalEccErrors": 3}})
def __getattr__(name):
    return getattr(_nvml, name)
"""
SITE = "[settings.gpus]\ncount = 2\n"
SCRIPT = """
import os, sys, time
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

run = train.attach()
state = {"w": np.zeros(4)}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
start, _ = checkpoint.restore(state) or (0, None)
sees, node = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURMD_NODENAME"]
print(f"round {run.round}: rank {run.rank} of {run.world_size} on {node} sees {sees}", flush=True)
for step in run.steps(start, 1000, save=lambda done: checkpoint.save(done, state), every=10):
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
"""


class Job:
    """One launch on the cluster; its files are in a folder of /shared."""

    def __init__(self, cluster: DevCluster, name: str) -> None:
        self.cluster = cluster
        self.folder = cluster.shared / name
        self.seen = f"/shared/{name}"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(SCRIPT)
        (self.folder / "pynvml.py").write_text(PYNVML)
        (self.folder / "health.toml").write_text(SITE)

    def submit(self, nodes: int, *options: str) -> None:
        launch = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", f"{self.seen}/run",
                  "--nproc-per-node=2", "--no-torch", "--evict-devices=on", *options,
                  f"{self.seen}/train.py", f"{self.seen}/go"]  # fmt: skip
        self.cluster.submit(
            f"#!/bin/bash\n#SBATCH --nodes={nodes} --gpus-per-node=2 --no-kill --time=20 --output={self.seen}/out.txt\n"
            f"export PYTHONPATH={package_folder()}\nexec {' '.join(launch)}\n"
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in events_of(self.folder / "run") if event.kind == kind]

    def output(self) -> str:
        return (self.folder / "out.txt").read_text() if (self.folder / "out.txt").exists() else "no output"

    def wait_for(self, reached: Callable[[], object]) -> None:
        until(reached, "the run has not come so far", self.output)

    def gpu_goes_bad(self, node: str) -> None:
        """Root's checks look at the node, as its health daemon does, and keep their verdict there."""
        command = [sys.executable, "-m", "resilio_hpc.cli.main", "health", "run", "--write", "--quiet"]
        environment = [f"PYTHONPATH={package_folder()}:{self.seen}", f"SLURMD_NODENAME={node}"]
        argv = ["env", *environment, *command, "--site", f"{self.seen}/health.toml"]
        assert self.cluster.run(node, argv, check=False, timeout_s=120.0).returncode == 1
        assert BAD in self.cluster.run(node, ["cat", f"{HEALTH}/verdict"]).stdout

    def kill_a_rank(self, node: str) -> None:
        pids = [event["pids"] for event in self.events("ranks") if event["node"] == node][-1]
        self.cluster.run(node, ["kill", "-9", str(next(iter(pids.values())))])

    def finish(self) -> None:
        (self.folder / "go").touch()
        self.wait_for(lambda: self.events("verdict"))
        assert self.events("verdict")[-1]["verdict"] == "completed", self.output()


@pytest.fixture
def job(cluster: DevCluster, request: pytest.FixtureRequest) -> Iterator[Job]:
    yield Job(cluster, request.node.name)
    cluster.run("ctl", ["scancel", "--user=root"])
    for node in cluster.nodes:
        cluster.run(node, ["rm", "-rf", HEALTH], check=False)
    cluster.wait_for_idle(timeout_s=60.0)


def test_a_node_goes_on_with_its_other_gpu(job: Job) -> None:
    job.submit(2)
    job.wait_for(lambda: job.events("committed"))
    members = job.events("round")[-1]["members"]
    job.gpu_goes_bad(members[1])
    job.kill_a_rank(members[1])
    job.wait_for(lambda: job.events("recovered"))
    job.finish()
    (evicted,) = job.events("device_evicted")
    assert (evicted["node"], evicted["device"], evicted["index"], evicted["entry"]) == (members[1], BAD, 1, "1")
    assert (evicted["check"], evicted["source"], evicted["slots"], evicted["of"]) == ("gpu-ecc", "verdict", 1, 2)
    last = job.events("round")[-1]
    assert (last["members"], last["world_size"]) == (members, 3)
    assert f"of 3 on {members[1]} sees 0\n" in job.output() and f"of 3 on {members[0]} sees 0,1\n" in job.output()
    assert f"{members[1]}: GPU 1 ({BAD}) is out of use (gpu-ecc: " in job.output()


def test_a_spare_takes_the_place_of_a_node_with_a_bad_gpu(job: Job) -> None:
    job.submit(3, "--spares=1")
    job.wait_for(lambda: job.events("committed"))
    first = job.events("round")[-1]["members"]
    job.gpu_goes_bad(first[1])
    job.kill_a_rank(first[1])
    job.wait_for(lambda: job.events("recovered"))
    job.finish()
    last = job.events("round")[-1]
    assert first[1] not in last["members"] and first[0] == last["members"][0]
    assert last["world_size"] == 4
    assert [event["node"] for event in job.events("device_evicted")] == [first[1]]
