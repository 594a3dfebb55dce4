"""``resilio check`` on real jobs: alerts that fire while a run loses a node, or its chain ends, and that clear."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

TRAIN = """
import time
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
run = train.attach()
state = {"weights": [0.0]}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
restored = checkpoint.restore(state)
for step in run.steps(restored[0] if restored else 0, 100000, save=checkpoint.saver(state), every=20):
    time.sleep(0.05)
"""


class AlertedJob:
    """A job on the cluster, and what checks of its run from the login node say."""

    def __init__(self, cluster: DevCluster, name: str, nodes: int, *options: str) -> None:
        self.cluster, self.name = cluster, name
        self.path = cluster.shared / name
        (self.path).mkdir()
        (self.path / "train.py").write_text(TRAIN)
        launch = f"{sys.executable} -m resilio_hpc.cli.resilio_launch --no-torch --nproc-per-node 1"
        self.script = (
            f"#!/bin/bash\n#SBATCH --no-kill --exclusive --nodes={nodes} --output=/shared/{name}.txt\n"
            f"export PYTHONPATH={ROOT}\ncd /shared/{name}\nexec {launch} --run-dir run {' '.join(options)} train.py\n"
        )
        self.job = cluster.submit(self.script)
        until(lambda: self.events("committed"), "a first checkpoint", self.output, patience_s=PATIENCE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in read_ledger(self.path / "run" / "ledger") if event.kind == kind]

    def output(self) -> str:
        file = Path(f"{self.path}.txt")
        return file.read_text()[-3000:] if file.exists() else "no output"

    def resilio(self, *words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", *words]
        done = self.cluster.run("ctl", argv, check=False, env={"PYTHONPATH": str(ROOT)}, cwd=f"/shared/{self.name}")
        return done.returncode, done.stdout + done.stderr

    def alerts(self) -> dict[str, dict[str, Any]]:
        code, out = self.resilio("check", "run", "--json", "--no-action")
        (run,) = json.loads(out)["runs"]
        found = {alert["name"]: alert for alert in run["alerts"]}
        severities = {alert["severity"] for alert in run["alerts"]}
        assert code == (4 if "critical" in severities else 3 if severities else 0)
        return found


def test_a_node_without_power(cluster: DevCluster) -> None:
    job = AlertedJob(cluster, "alerts-of-nodes", 3, "--spares", "1")
    assert job.alerts() == {}
    assert job.resilio("check", "run", "--changes", "--no-action") == (0, "")
    victim = job.events("round")[-1]["members"][1]
    cluster.machines.crash(victim)
    until(lambda: job.events("recovered"), "the spare takes over", job.output)
    found = job.alerts()
    assert {"suspect_node", "spares_spent"} <= set(found)
    assert found["suspect_node"]["node"] == victim and found["suspect_node"]["severity"] == "warning"
    code, out = job.resilio("check", "run", "--changes", "--no-action")
    assert code == 3 and f"node {victim} was at fault" in out and "spares_spent" in out
    cluster.run("ctl", ["scancel", "--signal=TERM", "--full", str(job.job)])
    until(lambda: (job.path / "run" / "verdict.json").exists(), "the job ends", job.output)
    until(lambda: job.alerts() == {}, "its alerts clear", lambda: json.dumps(job.alerts()))
    code, out = job.resilio("check", "run", "--changes", "--no-action")
    assert code == 0 and "CLEAR suspect_node of " in out and "CLEAR spares_spent after " in out


def test_the_last_job_of_a_chain(cluster: DevCluster) -> None:
    job = AlertedJob(cluster, "alerts-of-chains", 1, "--chain", "--chain-max", "1")
    assert job.alerts()["chain_exhausted"]["severity"] == "warning"
    cluster.end_at_time_limit(job.job, 60)
    until(lambda: (job.path / "run" / "verdict.json").exists(), "the time limit ends it", job.output)
    until(lambda: "critical" in str(job.alerts()), "it is critical", lambda: json.dumps(job.alerts()))
    found = job.alerts()
    assert found["chain_exhausted"]["severity"] == "critical" and "time_limit_as_failure" not in found
    cluster.wait_for_job(job.job, ("COMPLETED", "FAILED", "TIMEOUT"), PATIENCE_S)
    cluster.submit(job.script)  # a chain of one job keeps no script that could be submitted for its user
    until(lambda: len(job.events("launch")) == 2, "the next job begins", job.output, patience_s=120.0)
    until(lambda: "critical" not in str(job.alerts()), "it is known", job.output, patience_s=30.0)
