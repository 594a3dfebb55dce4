"""What counts as progress where no step is ever durable: time without failures; and whether a start was long enough."""

from __future__ import annotations

import pytest

from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def fail_after(world: World, quiet_s: float) -> None:
    world.run(lambda: any(controller.run.phase == "running" for controller in world.controllers()))
    world.run(limit_s=quiet_s)
    world.fail_rank(1)


@pytest.mark.parametrize(("quiet_s", "over"), [(25.0, False), (5.0, True)])
def test_restarts_of_a_plain_script_are_forgiven_after_a_while_without_failures(quiet_s: float, over: bool) -> None:
    world = World(
        nodes=2, script=Script(steps=10_000, attached=False), max_without_progress=2, forgiven_after_s=20.0
    )  # fmt: skip
    for _ in range(3):
        fail_after(world, quiet_s)
    world.run(limit_s=2.0)
    assert (world.directory.verdict is not None) is over
    assert [told["restarts"] for told in world.records("forgiven")] == ([] if over else [1, 1])


def test_those_of_a_script_that_commits_are_not() -> None:
    world = World(nodes=2, script=Script(steps=10_000, save_every=10), max_without_progress=2, forgiven_after_s=1.0)
    world.until_step(12)
    world.saver_fails = {(node, step) for node in world.sites for step in range(20, 2000, 10)}
    for _ in range(3):
        fail_after(world, 5.0)
    assert world.until_over()["verdict"] == "no_progress"


@pytest.mark.parametrize(("script", "trained"), [
    (Script(step_s=1000.0), False), (Script(), True), (Script(step_s=1000.0, attached=False), True)
])  # fmt: skip
def test_a_verdict_tells_whether_ranks_that_attached_came_to_a_first_step(script: Script, trained: bool) -> None:
    world = World(nodes=2, script=script, stop_grace_s=5.0)
    world.run(limit_s=10.0)
    world.warn("USR2")
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["trained"]) == ("time_limit", trained)


def test_and_whether_any_rank_was_started() -> None:
    world = World(nodes=2, stop_grace_s=5.0)
    world.spawns = False  # what ranks need is imported for longer than the job lasts
    world.run(limit_s=10.0)
    world.warn("USR2")
    assert world.until_over()["trained"] is False
