"""Every fault once, on a real Slurm: the run comes over it, with exactly the right result."""

from __future__ import annotations

import pytest

from resilio_hpc.demo.drill import DRILLS, Drill, DrillRun
from resilio_hpc.slurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name.replace(" ", "-"))
def test_a_run_comes_over(drill: Drill, repaired_cluster: DevCluster, request: pytest.FixtureRequest) -> None:
    name = f"drill-{abs(hash(drill.name)) % 10_000}"
    result = DrillRun(repaired_cluster, drill, name).run()
    assert result.passed, f"{result.why}\n{(repaired_cluster.shared / f'{name}.txt').read_text()[-6000:]}"
    if drill.kind and drill.kind != "time_limit":
        assert result.recovery_s is not None
        assert result.lost_steps is not None
