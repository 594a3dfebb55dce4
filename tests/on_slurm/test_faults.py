"""Fault drills on a real Slurm: the run comes over each fault, with exactly the right result.

The ranks do without torch, but for one drill: what is drilled is the control plane. Each kind of fault strikes once in
the quick tests, on the oldest Slurm that we support, and two on the newest. The long run (``make test-all``) does every
drill, with torch, and all three series of Slurm. ``benchmarks/faults.py`` repeats them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES
from resilio_hpc.drills.drill import DrillRun
from resilio_hpc.drills.kind import Drill
from resilio_hpc.drills.table import DRILLS, drill_named
from tests.support.ckpt.fabric_pair import read_by
from tests.support.clusters import MIDDLE_SERIES, each_series, own_cluster
from tests.support.requirements import need_fabric, need_shared_mounts

QUICK = (
    *("rank SIGKILL", "rank exception", "rank exits 0 too early", "rank SIGSTOP"),
    *("agent SIGKILL", "controller's agent SIGKILL", "srun SIGKILL"),
    *("node power cut, partner copies", "node power cut, no spare", "srun: node power cut, with a spare"),
    *("one node cut off", "an administrator sets a node down"),
    *("two ranks killed, the second during recovery", "a rank killed and another node's power cut"),
    *("time limit", "scancel", "preempted, requeue"),
)
WITH_TORCH = "node power cut, with a spare"  # a whole run as users have it: zygotes that import torch, gloo
ON_NEWEST = ("controller's agent SIGKILL", "time limit")
ON_NEWER = (
    *("rank SIGKILL", "controller's agent SIGKILL", "node power cut, with a spare", "time limit", "scancel"),
    *("preempted, cancel", "preempted, requeue", "scontrol requeue", "srun: batch host power cut, chain"),
)


def name_of(drill: Drill) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in drill.full_name.lower())


def come_over(drill: Drill, cluster: DevCluster, torch: bool = False) -> None:
    result = DrillRun(cluster, drill, name_of(drill), torch=torch).run()
    assert result.passed, f"{result.why}\n{(cluster.shared / f'{name_of(drill)}.txt').read_text()[-6000:]}"


def named(*names: str, slow: bool = False) -> list[object]:
    drills = map(drill_named, names)
    return [pytest.param(drill, id=name_of(drill), marks=pytest.mark.slow if slow else ()) for drill in drills]


@pytest.mark.parametrize("drill", named(*QUICK))
def test_a_run_comes_over(drill: Drill, cluster: DevCluster) -> None:
    come_over(drill, cluster)


def test_a_run_with_torch_comes_over_a_lost_node(cluster: DevCluster) -> None:
    come_over(drill_named(WITH_TORCH), cluster, torch=True)


@pytest.mark.slow
def test_a_lost_nodes_state_is_read_in_its_partners_memory(cluster: DevCluster) -> None:
    """By libfabric, over its provider for TCP: there is no hardware for RDMA here."""
    need_fabric()
    arguments = ("--partner-copies", "--snapshot-transport", "fabric")
    drill = replace(
        drill_named("node power cut, partner copies"), name="node power cut, by libfabric", launch_arguments=arguments
    )  # fmt: skip
    come_over(drill, cluster)
    events = read_ledger(cluster.shared / name_of(drill) / "ledger")
    assert {event.fields["by"] for event in events if event.kind in ("copied", "fetched")} == {read_by()}


@each_series(NEWEST_SERIES)
@pytest.mark.parametrize(
    "drill", [*named(*ON_NEWEST), *named(*(name for name in ON_NEWER if name not in ON_NEWEST), slow=True)]
)
def test_a_run_comes_over_on_the_newest_slurm(drill: Drill, cluster: DevCluster) -> None:
    come_over(drill, cluster)


@pytest.mark.slow
@each_series(*MIDDLE_SERIES)
@pytest.mark.parametrize("drill", named(*ON_NEWER))
def test_a_run_comes_over_on_the_slurm_in_between(drill: Drill, cluster: DevCluster) -> None:
    come_over(drill, cluster, torch=True)


@pytest.mark.slow
@pytest.mark.parametrize("drill", named(*(drill.full_name for drill in DRILLS if drill.shared_mount == "bind")))
def test_a_run_with_torch_comes_over(drill: Drill, cluster: DevCluster) -> None:
    come_over(drill, cluster, torch=True)


@pytest.mark.slow
@pytest.mark.parametrize("drill", named(*(drill.full_name for drill in DRILLS if drill.shared_mount != "bind")))
def test_a_run_with_torch_comes_over_a_shared_directory_of_its_own(drill: Drill) -> None:
    need_shared_mounts()
    with own_cluster("drill", why="its /shared hangs or caches", nodes=4, shared_mount=drill.shared_mount) as own:
        come_over(drill, own, torch=True)
