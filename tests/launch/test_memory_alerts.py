"""In a virtual cluster: nodes with nearly full memory are reported once, many of them together, by any controller."""

from __future__ import annotations

from resilio_hpc.launch.controller.faults.memory_alerts import MOST_NAMES, QUIET_S
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

LONG = Script(steps=1_000_000, step_s=1.0, save_every=1_000_000)


def test_a_level_is_told_once_and_a_higher_one_again() -> None:
    world = World(nodes=3, script=LONG)
    world.until_step(5)
    world.sites["n2"].memory_level = 1
    world.run(limit_s=5)
    (alert,) = world.records("memory_alert")
    assert (alert["node"], alert["level"], alert["count"], alert["nodes"]) == ("n2", 1, 1, ["n2"])
    assert alert["text"] == "memory: 97 % of 1 TiB in use"
    world.sites["n2"].memory_level = 2
    world.run(limit_s=QUIET_S + 5)
    assert [alert["level"] for alert in world.records("memory_alert")] == [1, 2]
    world.run(limit_s=3 * QUIET_S)
    assert len(world.records("memory_alert")) == 2
    assert world.records("decision") == []  # nothing is done about it


def test_a_level_that_was_left_may_be_told_again() -> None:
    world = World(nodes=2, script=LONG)
    world.until_step(5)
    for level in (1, 0, 1):
        world.sites["n1"].memory_level = level
        world.run(limit_s=QUIET_S + 5)
    assert len(world.records("memory_alert")) == 2


def test_many_nodes_are_one_alert() -> None:
    world = World(nodes=20, script=LONG)
    world.until_step(5)
    for number, site in enumerate(world.sites.values()):
        site.memory_level = 2 if number == 7 else 1
    world.run(limit_s=QUIET_S + 5)
    first, *more = world.records("memory_alert")
    assert len(more) <= 1
    assert sum(alert["count"] for alert in world.records("memory_alert")) == 20
    assert all(len(alert["nodes"]) <= MOST_NAMES for alert in world.records("memory_alert"))
    if first["count"] == 20:
        assert (first["node"], first["level"]) == ("n8", 2)


def test_the_next_controller_knows_of_it() -> None:
    world = World(nodes=3, script=LONG)
    world.until_step(5)
    world.sites["n3"].memory_level = 1
    world.run(limit_s=5)
    world.kill_agent("n1")
    world.run(lambda: len(world.records("memory_alert")) == 2, limit_s=60)
    assert {alert["node"] for alert in world.records("memory_alert")} == {"n3"}
