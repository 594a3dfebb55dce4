"""``resilio plan profile-comm`` in a job: what it measures over nodes."""

from __future__ import annotations

import sys

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.devtools.devcluster import DevCluster


def test_a_job_measures_over_nodes(cluster: DevCluster) -> None:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "plan", "profile-comm", "--backend=gloo", "--nodes=2"]
    done = cluster.run(
        "ctl", [*argv, "--ranks-per-node=2", "--seconds=1", "--out=/shared/comm.h5"], 300.0,
        env={"OMP_NUM_THREADS": "1", "PATH": cluster.machines.environment()["PATH"]}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = profile_file.read(cluster.shared / "comm.h5")
    about = found.about_communication
    assert about is not None and about["hosts"] == "n1,n2" and about["nodes"] == "2" and about["slurm_job"]
    assert {curve.span for curve in found.curves} <= {"node", "network"} and found.curves
    assert not list(cluster.shared.glob("comm.h5.*.log"))
