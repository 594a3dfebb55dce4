"""What the cluster has free, from nodes, partitions and jobs."""

from __future__ import annotations

import math

import pytest

from resilio_hpc.autoparallel import Inventory, Waiting, take_inventory
from resilio_hpc.devtools.devcluster.spec import SLURM_SERIES
from resilio_hpc.slurm.client import job_json, node_json, text_output
from resilio_hpc.slurm.client.gres import parse_gres
from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.states import job_state, node_state
from tests.support.environments import ROOT

SAMPLES = ROOT / "tests" / "slurm" / "samples"
MAIN = Partition("main", "UP", max_nodes=math.inf)


def node(
    name: str, state: str, gpus: str = "gpu:h100:8", used: str = "", partitions: tuple[str, ...] = ("main",)
) -> Node:
    return Node(name, node_state([state]), partitions, gres=parse_gres(gpus), gres_used=parse_gres(used))


def idle(*nodes: Node) -> tuple[str, ...]:
    return tuple(name for pool in take_inventory(nodes, [MAIN], []).pools for name in pool.idle)


@pytest.mark.parametrize("state", ["idle", "idle~"])
def test_an_idle_node_is_idle_and_one_that_sleeps_too(state: str) -> None:
    assert idle(node("n1", state)) == ("n1",)


@pytest.mark.parametrize(
    "state",
    ["idle+drain", "down", "idle*", "allocated", "mixed", "idle$", "idle+reserved", "idle+completing", "idle@",
     "idle+planned", "no such state", "idle+down", "idle%", "idle+fail", "error"],
)  # fmt: skip
def test_any_other_node_is_not(state: str) -> None:
    assert idle(node("n1", state)) == ()


def test_a_node_that_slurm_keeps_for_a_waiting_job_is_planned() -> None:
    (pool,) = take_inventory([node("n1", "idle+planned"), node("n2", "idle")], [MAIN], []).pools
    assert (pool.idle, pool.planned) == (("n2",), ("n1",))


def test_kinds_of_gpus_are_pools_of_their_own_and_drained_nodes_in_none() -> None:
    nodes = [
        node("n1", "idle"), node("n2", "mixed", used="gpu:h100:3(IDX:0-2)"), node("n3", "idle", "gpu:a100:4"),
        node("n4", "idle+drain"), node("n5", "idle", ""),
    ]  # fmt: skip
    pools = take_inventory(nodes, [MAIN], []).pools
    assert [(pool.gpu_type, pool.gpus_per_node, pool.nodes, pool.unused) for pool in pools] == [
        ("", 0, ("n5",), (0,)), ("a100", 4, ("n3",), (4,)), ("h100", 8, ("n1", "n2"), (8, 5)),
    ]  # fmt: skip


def test_a_node_of_two_partitions_is_in_both_and_a_closed_partition_has_none() -> None:
    partitions = [MAIN, Partition("low", "UP", max_nodes=2), Partition("shut", "DOWN")]
    inventory = take_inventory([node("n1", "idle", partitions=("low", "main", "shut"))], partitions, [])
    assert [(pool.partition, pool.max_nodes) for pool in inventory.pools] == [("low", 2), ("main", None)]
    assert inventory.pool_of("n1", "low") is not None and inventory.pool_of("n1", "shut") is None


@pytest.mark.parametrize(
    ("reason", "waits"),
    [("Resources", True), ("Priority", True), ("None", True), ("Dependency", False), ("JobHeldUser", False),
     ("BeginTime", False), ("QOSMaxNodePerUserLimit", False), ("AssocGrpNodeLimit", False)],
)  # fmt: skip
def test_only_jobs_that_wait_for_nodes_count(reason: str, waits: bool) -> None:
    job = Job(7, job_state(["PENDING"]), reason=reason, user="bob", partition="main,low", node_count=2)
    found = take_inventory([], [], [job, Job(8, job_state(["RUNNING"]), reason="None", node_count=1)]).waiting
    assert found == ((Waiting("7", "bob", ("main", "low"), 2),) if waits else ())


@pytest.mark.parametrize("series", SLURM_SERIES)
def test_real_answers_of_each_series(series: str) -> None:
    nodes = node_json.parse_nodes((SAMPLES / f"nodes_{series}.json").read_text())
    partitions = text_output.parse_partitions((SAMPLES / f"partitions_{series}.txt").read_text())
    jobs = job_json.parse_jobs((SAMPLES / f"jobs_{series}.json").read_text())
    inventory = take_inventory(nodes, partitions, jobs)
    assert isinstance(inventory, Inventory) and inventory.pools
    names = {name for pool in inventory.pools for name in pool.nodes}
    assert names and names <= {node.name for node in nodes if not node.state.drain}
    assert all(set(pool.idle) | set(pool.planned) <= set(pool.nodes) for pool in inventory.pools)
