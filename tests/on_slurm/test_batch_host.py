"""The node of the batch script loses power: the others train on, and nothing of the job is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.drills.script import counting
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_the_survivors_finish_the_run_and_close_its_jobs(cluster: DevCluster) -> None:
    cluster = cluster
    launcher = Path(sys.executable).with_name("resilio-launch")
    job = cluster.submit(
        "#!/bin/bash\n#SBATCH --nodes=3 --no-kill --time=30 --output=/shared/batch-host.txt --open-mode=append\n"
        f"exec {launcher} --no-torch --spares=1 --chain --run-dir=/shared/batch-host "
        f"{Path(counting.__file__).resolve()} --without-torch --steps=200 --result=/shared/batch-host.result\n"
    )
    run = cluster.shared / "batch-host"

    def output() -> str:
        return (cluster.shared / "batch-host.txt").read_text()

    until(lambda: any(event.kind == "committed" for event in events_of(run)), "a committed step", output)
    batch_host = str(next(event.fields["nodes"] for event in events_of(run) if event.kind == "launch")[0])
    cluster.machines.crash(batch_host)
    until(lambda: not cluster.run("ctl", ["squeue", "-h", "-t", "PD,R"]).stdout.strip(), "no job left", output)
    assert json.loads((run / "verdict.json").read_text())["verdict"] == "completed"
    result = json.loads((cluster.shared / "batch-host.result").read_text())
    assert result["values"] == [counting.expected(200)]
    assert cluster.job_state(job) in ("CANCELLED", "COMPLETING", "COMPLETED", "NODE_FAIL")
