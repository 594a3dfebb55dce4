"""Limits in a virtual cluster: kept for the next controller, learned for one world and program, set by the user."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.launch.controller.faults.hangs import UNCERTAIN_S
from resilio_hpc.launch.controller.faults.limit_keeping import COLLECTIVE_MORE_S
from resilio_hpc.launch.rundir.limit_files import KeptLimits, LimitOrder
from resilio_hpc.watch.limit_table import FIRST_LIMIT_S, STEP, LimitEntry
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

SLOW = Script(step_s=3.0, steps=2000)


def entry(world: World, name: str) -> LimitEntry:
    return next(one for one in world.directory.limits.limits if one.name == name)


def trained(**options: object) -> World:
    """A run that has learned a limit of 9 s for its steps."""
    world = World(nodes=3, script=SLOW, **options)
    world.until_step(15)
    world.run(limit_s=3)
    assert entry(world, STEP).source == "learned"
    return world


def test_the_next_controller_goes_on_with_what_was_learned() -> None:
    world = trained()
    before = entry(world, STEP)
    leader = world.directory.epochs[-1].node
    world.kill_agent(leader)
    world.run(limit_s=1)
    world.start_agent(leader)
    world.run(lambda: world.records("recovered") != [])
    world.run(limit_s=10)
    now = entry(world, STEP)
    assert now.source == "learned"
    assert now.waits.number >= before.waits.number
    world.stop_rank(1)  # within the limit, though the new controller has seen hardly a step
    world.run(lambda: world.records("stalled") != [], limit_s=FIRST_LIMIT_S / 2)


@pytest.mark.parametrize("change", [{"program": "another"}, {"ranks": 5}], ids=str)
def test_another_program_or_another_number_of_ranks_is_learned_from_the_start(change: dict[str, object]) -> None:
    earlier = trained().directory.limits
    world = World(nodes=3, script=SLOW)
    world.directory.limits = msgspec.structs.replace(earlier, epoch=0, **change)
    world.until_step(2)
    world.run(limit_s=3)
    assert entry(world, STEP).source == "not learned yet"


def test_the_next_job_of_the_same_program_goes_on_with_it() -> None:
    earlier = trained().directory.limits
    world = World(nodes=3, script=SLOW)
    world.directory.limits = msgspec.structs.replace(earlier, epoch=0)
    world.until_step(2)
    world.run(limit_s=3)
    assert entry(world, STEP).source == "learned"


def test_an_order_is_followed_and_recorded_once() -> None:
    world = trained()
    world.directory.order = LimitOrder({STEP: 20.0, "hang": 33.0}, by="u", time=5.0)
    world.run(lambda: world.records("limits_set") != [])
    assert world.records("limits_set") == [{"limits": {STEP: 20.0, "hang": 33.0}, "again": [], "by": "u"}]
    world.run(limit_s=5)
    assert (entry(world, STEP).limit_s, entry(world, "hang").limit_s, world.directory.limits.ordered) == (20, 33, 5.0)
    world.life.absent.add(1)
    world.run(lambda: world.records("recovered") != [], limit_s=60)
    assert world.records("stalled")[0]["limit_s"] == 20.0
    assert 33.0 <= world.records("hang")[-1]["silent_s"] < 36.0
    world.kill_agent("n1")
    world.start_agent("n1")
    world.run(lambda: len(world.records("recovered")) > 1)
    assert len(world.records("limits_set")) == 1  # the next controller found it in force


def test_an_order_for_a_run_that_waits_holds_from_its_first_step() -> None:
    world = World(nodes=2)
    world.directory.order = LimitOrder({"start": 40.0, STEP: 7.0}, by="u", time=5.0)
    world.until_step(2)
    world.run(limit_s=3)
    assert (entry(world, "start").limit_s, entry(world, STEP).limit_s) == (40.0, 7.0)


def test_what_is_to_be_learned_again_is_forgotten() -> None:
    world = trained()
    world.directory.order = LimitOrder(again={STEP: 5.0}, by="u", time=5.0)
    world.run(lambda: world.records("limits_set") != [])
    world.run(limit_s=3)
    assert entry(world, STEP).source == "not learned yet"
    world.directory.order = replace_time(world.directory.order, 6.0)  # a later order, about something else
    world.run(limit_s=120)
    assert entry(world, STEP).source == "learned"


def replace_time(order: LimitOrder, time: float) -> LimitOrder:
    return msgspec.structs.replace(order, time=time)


def test_what_is_kept_is_of_bounded_size() -> None:
    world = trained()
    data = msgspec.json.encode(world.directory.limits)
    assert len(data) < 4096
    assert msgspec.json.decode(data, type=KeptLimits) == world.directory.limits


def test_ranks_may_wait_in_a_collective_a_little_longer_than_the_launcher_does() -> None:
    world = World(nodes=2, script=SLOW)
    world.until_step(2)
    assert world.last.collective_s == UNCERTAIN_S + COLLECTIVE_MORE_S
    world.life.say_section("evaluation")
    world.run(limit_s=400.0)
    world.life.say_section("")
    world.run(limit_s=3)
    world.life.say_section("evaluation")
    world.run(limit_s=400.0)
    world.life.say_section("")
    world.run(limit_s=3)
    world.kill_agent("n2")
    world.start_agent("n2")
    world.until_round(1)
    world.run(lambda: len(world.starts) > 1)
    assert 1200.0 < world.last.collective_s < 1300.0  # three times a section's length


@pytest.mark.parametrize(("chosen", "seconds"), [(5.0, 120.0), (2000.0, 2060.0), (0.0, 660.0)])
def test_the_users_limit_of_hangs_counts_for_collectives(chosen: float, seconds: float) -> None:
    world = World(nodes=2, hang_timeout_s=chosen)
    world.until_step(2)
    assert world.last.collective_s == seconds
