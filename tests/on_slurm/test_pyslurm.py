"""A real pyslurm, where one is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmReader
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.reason import Finding
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.clusters import own_cluster
from tests.support.environments import ROOT

pytestmark = pytest.mark.slow
PYTHON = ROOT / ".venv-pyslurm" / "bin" / "python"


def test_a_real_pyslurm_says_what_the_commands_say() -> None:
    """pyslurm is built for the newest Slurm of the dev cluster by scripts/pyslurm_setup.sh."""
    if not PYTHON.exists():
        pytest.skip("there is no pyslurm (scripts/pyslurm_setup.sh)")
    why = "slurmctld is killed, and jobs stay"
    with own_cluster("pyslurm", why=why, nodes=3, gpus=2, slurm=NEWEST_SERIES) as cluster:
        inside = ["env", f"PYTHONPATH={ROOT}", str(PYTHON), "-m", "resilio_hpc.slurm.client.pyslurm_child"]
        variables = [f"{key}={value}" for key, value in cluster.machines.environment().items()]
        child = PyslurmReader(["env", "-i", *variables, *cluster.machines.command("ctl", inside)])
        asked: list[list[str]] = []

        def run(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
            asked.append(list(argv))
            return cluster.run("ctl", argv, timeout_s, env=extra)

        client, commands = PyslurmClient(child, run), CommandClient(run)
        assert client.agrees()
        for options in ([], ["--hold", "--time=90", "--comment=a | b", "--job-name=it's; a job"]):
            cluster.run("ctl", ["sbatch", "--nodes=1", *options, "--wrap=sleep 600"])
        assert client.agrees()
        told, said = ({job.id: job for job in one.jobs()} for one in (client, commands))
        assert told[2] == said[2] and told[2].time_limit_s == 5400 and told[2].comment == "a | b"
        assert client.partitions() == commands.partitions() and client.partitions()
        asked.clear()
        assert [job.name for job in client.jobs(["2"])] == ["it's; a job"] and client.nodes(["n2"])
        assert asked == []
        cluster.run("ctl", ["sbatch", "--nodes=1", "--array=1-3", "--dependency=afterany:1", "--wrap=true"])
        assert client.jobs() == commands.jobs() and client.agrees()
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
