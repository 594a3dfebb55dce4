"""Ranks that never come to the process group, in a virtual cluster; others wait for them, or none does."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.controller.faults.hangs import UNCERTAIN_S
from resilio_hpc.watch.limit_table import FIRST_LIMIT_S
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

SCRIPTS = {
    "attached": Script(steps=50, never_comes=1),
    "silent": Script(steps=50, never_comes=1, attached=False),
}


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> Script:
    return SCRIPTS[request.param]


def test_a_rank_that_is_stopped_before_it_comes_is_restarted(script: Script) -> None:
    world = World(nodes=2, script=script)
    world.run(lambda: bool(world.starts))
    began = world.now
    world.run(limit_s=2)
    world.stop_rank(1)
    world.run(lambda: len(world.starts) > 1, limit_s=100)
    (hang,) = world.records("hang")
    assert (hang["kind"], hang["ranks"], hang["certain"], hang["acted"]) == ("absent", [1], True, True)
    assert "did not come to init_process_group" in hang["evidence"]
    assert world.now - began < FIRST_LIMIT_S + 5
    world.run(lambda: world.records("verdict") != [])
    assert world.records("verdict")[0]["verdict"] == "completed"


def test_a_rank_that_only_takes_long_is_named_and_waited_for(script: Script) -> None:
    world = World(nodes=2, script=script)
    world.run(lambda: world.records("hang") != [], limit_s=FIRST_LIMIT_S + 10)
    (stalled,), (hang,) = world.records("stalled"), world.records("hang")
    assert (stalled["step"], hang["ranks"], hang["acted"]) == (-1, [1], False)
    assert hang["waits_until_s"] == UNCERTAIN_S
    world.run(lambda: len(world.starts) > 1, limit_s=UNCERTAIN_S + 10)
    assert world.records("hang")[-1]["acted"]


def test_ranks_that_are_late_with_their_stacks_wait_as_before(script: Script) -> None:
    world = World(nodes=2, script=script)
    world.run(lambda: world.records("hang") != [], limit_s=FIRST_LIMIT_S + 10)
    world.life.tells_stacks = False
    world.run(limit_s=60)
    world.life.tells_stacks = True
    world.run(lambda: len(world.starts) > 1, limit_s=UNCERTAIN_S)
    assert [fields["acted"] for fields in world.records("hang")] == [False, True]


def test_the_users_limit_holds_before_the_first_step_too() -> None:
    world = World(nodes=2, script=SCRIPTS["silent"], hang_timeout_s=5.0)
    world.run(lambda: len(world.starts) > 1, limit_s=FIRST_LIMIT_S + 10)
    assert world.records("hang")[-1]["ranks"] == [1]


@pytest.mark.parametrize("options", [{}, {"hang_timeout_s": 5.0}], ids=str)
def test_programs_that_say_nothing_and_wait_for_no_rank_are_left_alone(options: dict[str, float]) -> None:
    world = World(nodes=2, script=Script(attached=False, steps=20_000, shows_calls=False), **options)
    world.run(limit_s=1800)
    assert world.records("stalled") == world.records("hang") == world.records("recovered") == []


def test_a_start_that_takes_long_is_no_stall() -> None:
    world = World(nodes=2, script=Script(steps=50, start_s=500.0, shows_calls=False))
    world.run(lambda: world.records("verdict") != [], limit_s=600)
    assert world.records("stalled") == world.records("goes_on") == []
