"""Nodes that offer fewer ranks than before, in a virtual cluster: who takes part, and what it costs."""

from __future__ import annotations

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.world import World


def evicts_at_start(agent: VirtualAgent, slots: int, evicted: int) -> None:
    """As an agent that finds a bad device while ranks wait to be started."""
    spawn = agent.spawn

    def refuse_once(local: LocalRound, start: m.Start) -> None:
        if len(local.ranks) <= slots:
            spawn(local, start)
            return
        agent.core.offer(slots, evicted)
        agent.core.ranks.spawn_failed(slots, "out of use: GPU 1 (gpu-ecc)", agent.unix())

    agent.spawn = refuse_once  # type: ignore[method-assign]


def sizes(world: World) -> dict[str, int]:
    return {member.node: member.local_world_size for member in world.last.state.members}


def test_a_node_that_lost_a_device_goes_on_with_the_others() -> None:
    world = World(nodes=3)
    world.until_step(27)
    evicts_at_start(world.agents["n2"], 1, 1)
    world.fail_rank(3)
    world.run(lambda: world.records("recovered") != [])
    told = world.records("recovered")[-1]
    assert sizes(world) == {"n1": 2, "n2": 1, "n3": 2}
    assert (told["kind"], told["node"]) == ("rank_killed", "n2")  # the device is no other recovery
    assert world.last.restore is not None and world.last.restore.source == Tier.COMMITTED  # the world is another one
    assert world.controller.run.restarts == 2


def test_a_spare_takes_the_place_of_a_node_that_lost_a_device() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(27)
    evicts_at_start(world.agents["n2"], 1, 1)
    world.fail_rank(3)
    world.run(lambda: world.records("recovered") != [])
    assert sizes(world) == {"n1": 2, "n4": 2, "n3": 2}
    assert world.members() == ["n1", "n4", "n3"]
    world.power_off("n1")  # now nobody else is left: a node with one device is better than none
    world.until_round(3)
    assert sizes(world) == {"n2": 1, "n4": 2, "n3": 2}


def test_two_nodes_that_lose_devices_at_once_share_one_spare() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(27)
    for node in ("n1", "n2"):
        evicts_at_start(world.agents[node], 1, 1)
    world.fail_rank(3)
    world.run(lambda: world.records("recovered") != [])
    assert sorted(sizes(world).values()) == [1, 2, 2] and "n4" in sizes(world)


def test_a_node_without_devices_takes_no_part_and_another_size_is_chosen() -> None:
    world = World(nodes=3, minimum=2)
    world.until_step(27)
    evicts_at_start(world.agents["n2"], 0, 2)
    world.fail_rank(3)
    world.run(lambda: world.records("recovered") != [])
    assert sizes(world) == {"n1": 2, "n3": 2}
    assert world.records("decision")[-1]["rung"] == "shrink"
    assert "n2" not in world.controller.run.lost and "n2" in world.controller.run.agents  # it still votes


def test_where_no_other_size_is_allowed_the_run_ends_with_a_verdict() -> None:
    world = World(nodes=2)
    world.until_step(27)
    evicts_at_start(world.agents["n2"], 0, 2)
    world.fail_rank(3)
    assert world.until_over()["verdict"] == "not_enough_nodes"


def test_the_next_controller_hears_of_it_too() -> None:
    world = World(nodes=3, minimum=2)
    world.until_step(27)
    evicts_at_start(world.agents["n2"], 1, 1)
    world.fail_rank(3)
    world.run(lambda: world.records("recovered") != [])
    world.kill_agent(world.controller.run.node)
    world.until_round(3)
    assert sizes(world) == {"n2": 1, "n3": 2}
