"""Fault drills on a real Slurm: the run comes over each fault, with exactly the right result.

A short drill of each family runs with the quick tests, on the oldest Slurm that we support; those in which Slurm itself
takes part on the newest too. The long run (``make test-all``) does every drill, and the Slurm in between.
``benchmarks/faults.py`` repeats them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from resilio_hpc.demo.drill import DrillRun, cluster_for
from resilio_hpc.demo.drill_table import DRILLS, PREEMPTION, Drill, drill_named
from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster, image
from tests.support.clusters import repair, shared_mounts_or_skip, skip_without_slurm, unique_name

pytestmark = pytest.mark.slurm

CORE = ("rank SIGKILL", "controller's agent SIGKILL", "node power cut, with a spare", "time limit", "scancel")
QUICK = (
    *CORE,
    *(
        "node power cut, partner copies",
        "rank exception",
        "rank exits 0 too early",
        "agent SIGKILL",
        "node power cut, no spare",
    ),
    *("srun: rank SIGKILL", "srun: agent SIGKILL", "srun: node power cut, with a spare"),
    *("srun SIGKILL", "one node cut off", "two ranks killed, the second during recovery"),
    *("a rank killed and another node's power cut", "an administrator sets a node down"),
)


def name_of(drill: Drill) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in drill.full_name.lower())


def come_over(drill: Drill, cluster: DevCluster) -> None:
    result = DrillRun(cluster, drill, name_of(drill)).run()
    assert result.passed, f"{result.why}\n{(cluster.shared / f'{name_of(drill)}.txt').read_text()[-6000:]}"


@pytest.mark.parametrize("drill", [drill_named(name) for name in QUICK], ids=name_of)
def test_a_run_comes_over(drill: Drill, repaired_cluster: DevCluster) -> None:
    come_over(drill, repaired_cluster)


@pytest.mark.slow
@pytest.mark.parametrize("drill", [drill for drill in DRILLS if drill.full_name not in QUICK], ids=name_of)
def test_a_run_comes_over_on_a_cluster_of_its_own(drill: Drill) -> None:
    skip_without_slurm()
    if drill.shared_mount != "bind":
        shared_mounts_or_skip()
    with cluster_for(drill, unique_name("drill")) as own:
        come_over(drill, own)


@pytest.fixture(scope="module", params=["26.05", pytest.param("24.11", marks=pytest.mark.slow)])
def newer_cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Four nodes with a newer Slurm, whose root is built once and kept (RESILIO_TEST_SLURM allows it to be built)."""
    skip_without_slurm()
    series = request.param
    if not image.is_built(series) and series not in os.environ.get("RESILIO_TEST_SLURM", "").split(","):
        pytest.skip(f"no cached root with Slurm {series}; RESILIO_TEST_SLURM={series} builds it")
    name = unique_name(f"newer{series.replace('.', '')}")
    with DevCluster.start(name, nodes=4, slurm=series, binds=binds(), timeout_s=120.0, conf=PREEMPTION) as running:
        yield running


OF_SLURM = ("preempted, cancel", "preempted, requeue", "scontrol requeue", "srun: batch host power cut, chain")
ON_NEWER = [
    *(pytest.param(drill_named(name), id=name_of(drill_named(name))) for name in CORE),
    *(pytest.param(drill_named(name), id=name_of(drill_named(name)), marks=pytest.mark.slow) for name in OF_SLURM),
]


@pytest.mark.parametrize("drill", ON_NEWER)
def test_a_run_comes_over_on_newer_slurm(drill: Drill, newer_cluster: DevCluster) -> None:
    try:
        come_over(drill, newer_cluster)
    finally:
        repair(newer_cluster)
