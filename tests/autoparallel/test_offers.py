"""Which shapes a cluster has room for, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilio_hpc.autoparallel import Inventory, Pool, Waiting, take_inventory
from resilio_hpc.autoparallel.search.inventory_file import assumed, read_inventory
from resilio_hpc.autoparallel.search.offers import OfferRequest, offers, why_none
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.gres import parse_gres
from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.states import job_state, node_state

NODES = tuple(f"n{number}" for number in range(1, 9))
POOL = Pool("main", "h100", 8, NODES, NODES[:3], unused=(8, 8, 8, 4), frees_at=(1600.0, 9000.0))


def shapes(pool: Pool, request: OfferRequest, waiting: tuple[Waiting, ...] = ()) -> list[tuple[int, int, str]]:
    found = offers(Inventory((pool,), waiting), request, now=1000.0)
    return [(one.shape.nodes, one.shape.ranks_per_node, one.start) for one in found]


def test_all_shapes_of_a_number_have_most_gpus_per_node_first() -> None:
    assert shapes(POOL, OfferRequest(16, 16)) == [(2, 8, "now"), (4, 4, "now"), (8, 2, "ever")]
    assert shapes(POOL, OfferRequest(6, 6)) == [(1, 6, "now"), (2, 3, "now"), (3, 2, "now"), (6, 1, "ever")]


def test_a_range_has_whole_nodes_and_none_has_all_that_the_pool_is_large_enough_for() -> None:
    assert [found[:2] for found in shapes(POOL, OfferRequest(9, 32))] == [(4, 8), (3, 8), (2, 8)]
    assert [found[0] for found in shapes(POOL, OfferRequest())] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [found[0] for found in shapes(replace(POOL, max_nodes=2), OfferRequest())] == [2, 1]


def test_soon_is_when_running_jobs_reach_their_limits() -> None:
    assert shapes(POOL, OfferRequest(32, 40)) == [(5, 8, "ever"), (4, 8, "soon")]
    found = offers(Inventory((POOL,)), OfferRequest(32, 40), now=1000.0)
    assert [one.wait_s for one in found] == [8000.0, 600.0]
    assert offers(Inventory((POOL,)), OfferRequest(48, 48), now=1000.0)[0].wait_s is None


def test_jobs_that_wait_come_first() -> None:
    ahead = (Waiting("7", "u", ("main",), 1),)
    assert shapes(POOL, OfferRequest(32, 32), ahead)[0] == (4, 8, "ever")
    assert shapes(replace(POOL, planned=("n8",)), OfferRequest(32, 32), ahead)[0] == (4, 8, "soon")


def test_marks_say_what_is_shared_preempted_or_left_to_others() -> None:
    pool = replace(POOL, shared=True, preemptible=True)
    whole, part = offers(Inventory((pool,)), OfferRequest(16, 16), 0.0)[:2]
    assert whole.marks == ("over-subscribed", "preemptible") and "part of nodes" in part.marks


def test_the_kind_of_gpu_the_partition_and_its_time_limit_are_kept_to() -> None:
    inventory = Inventory((POOL, replace(POOL, partition="low", gpu_type="NVIDIA_A100-SXM4-80GB", max_time_s=3600.0)))
    assert {one.partition for one in offers(inventory, OfferRequest(8, 8, gpu="a100"), 0.0)} == {"low"}
    assert {one.partition for one in offers(inventory, OfferRequest(8, 8, ("main",)), 0.0)} == {"main"}
    assert {one.partition for one in offers(inventory, OfferRequest(8, 8, run_s=7200), 0.0)} == {"main"}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (OfferRequest(128, 128), "at most 64 (8 nodes x 8)"),
        (OfferRequest(8, 8, ("gpu",)), "no partition gpu has GPUs; those that do: main"),
        (OfferRequest(8, 8, gpu="b200"), "the types are h100"),
    ],
)
def test_what_is_in_the_way_is_named(request_: OfferRequest, answer: str) -> None:
    assert offers(Inventory((POOL,)), request_, 0.0) == []
    assert answer in why_none(Inventory((POOL,)), request_)


def test_slurms_answer_tells_when_nodes_get_free_and_how_many_gpus_are_unused() -> None:
    def node(name: str, state: str, used: str = "") -> Node:
        gres = parse_gres("gpu:h100:8")
        return Node(name, node_state(state.split("+")), ("main",), gres=gres, gres_used=parse_gres(used))

    partition = Partition("main", "UP", preempt_mode="REQUEUE", over_subscribe="FORCE:2")
    jobs = [
        Job(1, job_state(["RUNNING"]), nodes=("n2", "n3"), end_time=500),
        Job(2, job_state(["RUNNING"]), nodes=("n3",), end_time=900),
    ]
    nodes = [node("n1", "idle"), node("n2", "mixed", "gpu:h100:6"), node("n3", "allocated", "gpu:h100:8")]
    (pool,) = take_inventory([*nodes, node("n4", "idle+planned")], [partition], jobs).pools
    assert pool.unused == (8, 2) and pool.frees_at == (500.0, 900.0) and pool.shared and pool.preemptible


# -- inventory files -------------------------------------------------------------------------------------------------

TOML = """
[[pool]]
partition = "gpu"
gpu = "h100"
gpus_per_node = 8
nodes = "n[1-4]"
idle = "n[2-3]"
max_nodes = 3
"""


def test_an_inventory_file_is_toml_or_json() -> None:
    (pool,) = read_inventory(TOML, "c.toml").pools
    assert (pool.nodes, pool.idle, pool.max_nodes) == (("n1", "n2", "n3", "n4"), ("n2", "n3"), 3)
    json = '{"pool": [{"partition": "gpu", "gpu": "h100", "gpus_per_node": 4, "nodes": 3, "preemptible": true}]}'
    (pool,) = read_inventory(json, "c.json").pools
    assert len(pool.nodes) == len(pool.idle) == 3 and pool.preemptible


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "no pool"),
        ("[[pool", "c.toml: "),
        ("pool = 3", "no pool"),
        ("pool = [3]", "pool 1 is no table"),
        (TOML + "idel = 3", "unknown key 'idel'"),
        (TOML.replace("= 8", "= true"), "gpus_per_node = True is no whole number"),
        (TOML.replace("n[2-3]", "n[2-9]"), "not all among its 4 nodes"),
        (TOML.replace("n[1-4]", "n[1-"), "not a Slurm host list"),
        (TOML + "max_time_s = -1", "max_time_s = -1"),
        (TOML + "shared = 1", "shared = 1 is neither true nor false"),
    ],
)
def test_a_mistake_in_an_inventory_file_is_named(text: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer.replace("[", r"\[")):
        read_inventory(text, "c.toml")


def test_an_assumed_cluster_is_idle() -> None:
    found = offers(assumed(20, 8, "h100"), OfferRequest(16, 20), 0.0)
    assert [(one.shape.nodes, one.start) for one in found] == [(2, "now")]
