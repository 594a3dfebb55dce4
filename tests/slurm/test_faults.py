"""Every fault once, on a real Slurm: the run comes over it, with exactly the right result.

On the oldest Slurm that we support all of them, on the newest the ones in which Slurm itself takes part. The long run
(``make test-all``) repeats them and adds the Slurm in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cluster_fixture import repair, skip_without_slurm, unique_name

from resilio_hpc.demo.drill import DRILLS, Drill, DrillRun
from resilio_hpc.demo.stage import binds
from resilio_hpc.slurm.devcluster import DevCluster, image

pytestmark = pytest.mark.slurm

CORE = ("rank SIGKILL", "controller's agent SIGKILL", "node power cut, with a spare", "time limit", "scancel")


def name_of(drill: Drill) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in drill.name.lower())


def come_over(drill: Drill, cluster: DevCluster, name: str) -> None:
    result = DrillRun(cluster, drill, name).run()
    assert result.passed, f"{result.why}\n{(cluster.shared / f'{name}.txt').read_text()[-6000:]}"
    if drill.kind and drill.kind != "time_limit":
        assert result.recovery_s is not None
        assert result.lost_steps is not None


@pytest.mark.parametrize("drill", DRILLS, ids=name_of)
def test_a_run_comes_over(drill: Drill, repaired_cluster: DevCluster) -> None:
    come_over(drill, repaired_cluster, name_of(drill))


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(1, 5))
@pytest.mark.parametrize("drill", DRILLS, ids=name_of)
def test_a_run_comes_over_again(drill: Drill, repeat: int, repaired_cluster: DevCluster) -> None:
    come_over(drill, repaired_cluster, f"{name_of(drill)}-{repeat}")


@pytest.fixture(scope="module", params=["26.05", pytest.param("24.11", marks=pytest.mark.slow)])
def newer_cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Four nodes with a newer Slurm, whose root is built once and kept (RESILIO_TEST_SLURM allows it to be built)."""
    skip_without_slurm()
    series = request.param
    if not image.is_built(series) and series not in os.environ.get("RESILIO_TEST_SLURM", "").split(","):
        pytest.skip(f"no cached root with Slurm {series}; RESILIO_TEST_SLURM={series} builds it")
    name = unique_name(f"newer{series.replace('.', '')}")
    with DevCluster.start(name, nodes=4, slurm=series, binds=binds(), timeout_s=120.0) as running:
        yield running


@pytest.mark.parametrize("drill", [drill for drill in DRILLS if drill.name in CORE], ids=name_of)
def test_a_run_comes_over_on_newer_slurm(drill: Drill, newer_cluster: DevCluster) -> None:
    try:
        come_over(drill, newer_cluster, name_of(drill))
    finally:
        repair(newer_cluster)
