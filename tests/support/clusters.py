"""The dev cluster as pytest fixtures, which tests/conftest.py gives to all tests.

``cluster`` is one five-node cluster for the whole test session; a test that breaks a node repairs it before it ends
(``repaired_cluster`` does that for it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster
from resilio_hpc.slurm.devcluster.requirements import check
from resilio_hpc.slurm.devcluster.spec import ClusterSpec


def skip_without_slurm() -> None:
    """Skip the test, with the reason, where no dev cluster can be started."""
    try:
        check(ClusterSpec(name="probe"))
    except UsageError as error:
        pytest.skip(str(error))


def shared_mounts_or_skip() -> None:
    """Skip the test, with the reason, where no /shared that hangs or caches can be had."""
    try:
        check(ClusterSpec(name="probe", shared_mount="fuse"))
    except UsageError as error:
        pytest.skip(str(error))


def unique_name(prefix: str) -> str:
    """A cluster name of this test run's own: several runs may share a machine."""
    return f"{prefix}-{os.getpid()}"


def repair(cluster: DevCluster) -> None:
    """Bring every machine, cable and daemon of the cluster back, and cancel all jobs."""
    for machine in cluster.machines().values():
        if machine.state in ("off", "failed"):
            cluster.boot(machine.name)
        elif not machine.link_up:
            cluster.heal(machine.name)
    for name, program in [("ctl", "slurmctld"), *((node, "slurmd") for node in cluster.nodes)]:
        if not any(process.program == program for process in cluster.pids(name)):
            cluster.start_slurmctld() if name == "ctl" else cluster.start_slurmd(name)
    cluster.run("ctl", ["scancel", "--user=root"])
    cluster.wait_for_idle(timeout_s=120.0)  # a node that was lost completes when slurmctld asks it again


@pytest.fixture(scope="session")
def cluster() -> Iterator[DevCluster]:
    """Five idle nodes n1…n5 with two fake GPUs each, on this host's own Slurm."""
    skip_without_slurm()
    with DevCluster.start(unique_name("test"), nodes=5, gpus=2, slurmd_timeout_s=5, binds=binds()) as running:
        yield running


@pytest.fixture
def repaired_cluster(cluster: DevCluster) -> Iterator[DevCluster]:
    """The session's cluster for a test that breaks things: repaired afterwards."""
    yield cluster
    repair(cluster)
