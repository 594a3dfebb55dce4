"""``--layout auto`` on a real Slurm: a node is lost, none replaces it, and the run goes on in the planner's layout."""

from __future__ import annotations

import json
import sys

import pytest

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from tests.support.clusters import each_series, own_cluster
from tests.support.slurm import planned_training
from tests.support.slurm.submitted import Submitted
from tests.support.waiting import until

SCRIPT = str(planned_training.__file__)
WORDS = f"llama2-13b --global-batch {planned_training.BATCH} --seq 2048 --vpp 1"


def layouts(job: Submitted) -> list[Fields]:
    return [Fields(event.fields) for event in job.events() if event.kind == "layout"]


def numbers(layout: Fields) -> tuple[object, ...]:
    return tuple(layout.data.get(name) for name in ("gpu", "ranks", "tp", "pp", "dp", "micro_batch"))


def shrunk(cluster: DevCluster, name: str, lost: str) -> list[tuple[object, ...]]:
    """Run on three nodes, lose one, and train on; return the layouts of its rounds, all else asserted."""
    job = Submitted(cluster, name)
    out = job.directory / "result.json"
    options = ["--no-torch", "--heartbeat-timeout", "3", "--layout", "auto", "--layout-options", WORDS]
    values = ["gpus_per_node=2", "ranks_per_node=2", "time=30", "nodes=3", "min_nodes=1", "max_nodes=3"]
    job.submit("elastic", [*values, "partition=main"], [*options, SCRIPT, f"{job.inside}/result.json"])
    until(lambda: sum(event.kind == "committed" for event in job.events()) > 1, "two commits", job.output)
    cluster.machines.crash(lost)
    until(lambda: len(layouts(job)) > 1, "another layout", job.output)
    second = layouts(job)[1].whole("round")
    until(
        lambda: any(e.kind == "first_step" and e.fields["round"] == second for e in job.events()), "steps", job.output
    )
    (path,) = job.run_directories()
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "why", f"{job.inside}/resilio-runs/{path.name}"]
    why = cluster.run("ctl", argv)
    out.with_suffix(".end").touch()
    assert job.verdict() == "completed", job.output()
    result = json.loads(out.read_text())
    assert result["matrix"] == planned_training.expected(result["steps"])
    first = next(event for event in job.events() if event.kind == "first_step" and event.fields["round"] == second)
    assert first.fields["source"] == "committed"
    assert Fields(first.fields).whole("restored") is not None
    before, after, *_ = layouts(job)
    assert (before.has("before"), after.inner("before").whole("tp")) == (False, before.whole("tp"))
    assert "planned for 2 x 2" in after.text("why")
    said = " ".join(why.stdout.split())
    assert f"tp={after.whole('tp')}, pp={after.whole('pp')}, dp={after.whole('dp')}" in said, said
    return [numbers(before), numbers(after)]


@pytest.mark.slow
@each_series(HOST_SERIES, slow=[NEWEST_SERIES])
def test_a_lost_node_that_nothing_replaces_means_the_planners_layout_of_what_is_left(cluster: DevCluster) -> None:
    nodes = cluster.run("ctl", ["sinfo", "-hN", "-p", "main", "-t", "idle", "-o", "%N"]).stdout.split()
    assert shrunk(cluster, "planned-shrink", sorted(nodes)[2]) == [
        ("h100", 6, 1, 3, 2, 1),
        ("h100", 4, 2, 2, 1, 1),
    ]


@pytest.mark.slow
def test_where_gpus_of_another_type_are_left_the_layout_is_theirs() -> None:
    why = "its nodes have GPUs of two types"
    with own_cluster("mixed", why=why, nodes=3, gpus=2, gpu_type="h200,h200,a100") as cluster:
        assert shrunk(cluster, "planned-mixed", "n3") == [("a100", 6, 2, 3, 1, 2), ("h200", 4, 2, 1, 2, 6)]
