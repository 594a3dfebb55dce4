"""A real pyslurm, where one is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmReader
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.reason import Finding
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.clusters import own_cluster
from tests.support.environments import ROOT


def test_a_real_pyslurm_says_what_the_commands_say() -> None:
    """RESILIO_TEST_PYSLURM: a Python that has pyslurm, built for the 26.05 of the dev cluster (docs/devcluster.md)."""
    python = os.environ.get("RESILIO_TEST_PYSLURM", "")
    if not python:
        pytest.skip("RESILIO_TEST_PYSLURM names no Python with pyslurm")
    shown = [*binds(), *(Path(one) for one in os.environ.get("RESILIO_TEST_PYSLURM_BINDS", "").split(":") if one)]
    why = "it shows the Python with pyslurm"
    with own_cluster("pyslurm", why=why, nodes=3, gpus=2, slurm="26.05", binds=shown) as cluster:
        inside = ["env", f"PYTHONPATH={ROOT}", python, "-m", "resilio_hpc.slurm.client.pyslurm_child"]
        variables = [f"{key}={value}" for key, value in cluster.machines.environment().items()]
        child = PyslurmReader(["env", "-i", *variables, *cluster.machines.command("ctl", inside)])
        client = PyslurmClient(child, lambda argv, timeout_s, extra: cluster.run("ctl", argv, timeout_s, env=extra))
        assert client.agrees()
        drainer = DrainWriter(client, drain_policy(), AuditLog(None))
        assert drainer.drain("n1", Finding("gpu.xid", "Xid 79")).result == "drained"
        cluster.run("ctl", ["scontrol", "update", "NodeName=n2", "Comment=a | b"])
        client.orders.set_weight(["n3"], 7)
        assert client.agrees()
        assert client.nodes(["n1"])[0].state.drain
        assert drainer.undrain("n1").result == "undrained"
        cluster.machines.kill_slurmctld()
        with pytest.raises(Unanswered):
            client.nodes()
