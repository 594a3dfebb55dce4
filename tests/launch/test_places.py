"""A node comes back to the ranks whose state its own disk has: decided by real controllers, over a virtual cluster."""

from __future__ import annotations

import pytest

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.controller.members.gathering import DISKS_S
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

STEP = 40
SLOTS = 2


def next_job(nodes: int = 3, spares: int = 0, **config: bool) -> World:
    """A job that goes on from a committed step. Its nodes have disks of their own."""
    world = World(nodes=nodes, spares=spares, slots=SLOTS, **{"local_disks": True, **config})
    world.directory.committed[STEP] = ((0, 1, 0),)
    return world


def tell(world: World, node: str, place: int | None, step: int = STEP, nodes: int = 3) -> None:
    """What the agent's look at its disk has found. ``place``: whose state of a step; None: there is nothing."""
    agent = world.agents[node]
    copies = () if place is None else (OwnCopy(step, SLOTS * place, SLOTS, SLOTS * nodes),)
    agent.event(lambda: agent.core.ranks.reports.tell_of_node(m.DiskSeen(node, 0, copies)))


def members(world: World) -> list[str]:
    return [str(node) for node in world.records("round")[-1]["members"]]


def test_the_next_job_gives_each_node_the_ranks_whose_state_its_disk_has() -> None:
    world = next_job()
    for node, place in (("n1", 1), ("n2", 2), ("n3", None)):
        tell(world, node, place)
    world.run(lambda: world.starts != [])
    assert members(world) == ["n3", "n1", "n2"]
    assert world.starts[-1][1].restore == m.RestorePoint("committed", STEP)  # type: ignore[arg-type]
    (placed,) = world.records("placed")
    assert words("placed", placed) == "n1 takes place 1, n2 takes place 2: their disks have step 40 of those ranks"
    world.until_step(STEP + 5)


def test_a_node_whose_disk_has_nothing_is_the_spare() -> None:
    world = next_job(spares=1)
    for node, place in (("n1", None), ("n2", 1), ("n3", 0), ("n4", 2)):
        tell(world, node, place)
    world.run(lambda: world.starts != [])
    assert members(world) == ["n3", "n2", "n4"]


def test_a_start_does_not_wait_long_for_reports_that_do_not_come() -> None:
    world = next_job()
    tell(world, "n3", 0)
    began = world.now
    world.run(lambda: world.records("round") != [])
    assert members(world) == ["n3", "n1", "n2"]  # what was reported counts
    assert DISKS_S <= world.now - began < DISKS_S + 1.0


@pytest.mark.parametrize("has_steps", [False, True], ids=["nothing committed", "no disks"])
def test_a_start_that_restores_nothing_from_disks_does_not_wait(has_steps: bool) -> None:
    world = next_job(local_disks=not has_steps)
    if not has_steps:
        world.directory.committed.clear()
    began = world.now
    world.run(lambda: world.records("round") != [])
    assert members(world) == ["n1", "n2", "n3"]
    assert world.now - began < 1.0
    assert world.records("placed") == []


def moved(world: World) -> None:
    """The last two nodes of three stand in the other order, and a step is committed in it."""
    for node, place in (("n1", 0), ("n2", 2), ("n3", 1), ("n4", None), ("n5", None)):
        tell(world, node, place)
    world.run(lambda: max(world.directory.committed) > STEP)
    world.run(limit_s=0.5)
    assert members(world) == ["n1", "n3", "n2"]


def spares_take_over(world: World) -> int:
    """They go on from the step that was committed last, which this returns, and do not reach the next one."""
    world.run(lambda: {world.last.state.members[place].node for place in (1, 2)} == {"n4", "n5"})
    world.run(limit_s=2.0)
    return max(world.directory.committed)


@pytest.mark.parametrize("is_cut", [False, True], ids=["they start again", "they were cut off"])
def test_nodes_that_were_lost_and_return_get_the_places_back_that_they_had(is_cut: bool) -> None:
    world = next_job(spares=2)
    moved(world)
    world.script = Script(steps=5000, save_every=5000)  # nothing is committed from here on
    for node in ("n2", "n3"):
        world.cut(node) if is_cut else world.power_off(node)
    step = spares_take_over(world)
    for node, place in (("n2", 2), ("n3", 1)):
        if is_cut:
            world.cut(node, False)
        else:
            world.sites[node].off = False
            world.start_agent(node)
            tell(world, node, place, step)
    world.run(lambda: len(world.records("node_returned")) == 2)
    world.run(limit_s=1.0)  # until they are voters again
    for node in ("n4", "n5"):
        world.power_off(node)
    world.run(lambda: {"n2", "n3"} <= set(world.members()))
    assert members(world) == ["n1", "n3", "n2"]
    assert world.records("placed")[-1]["places"] == {"n3": 1, "n2": 2}
