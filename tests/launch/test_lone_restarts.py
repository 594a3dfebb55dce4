"""Which failures are a rank's alone, and what they cost: the controller under --restart-policy failed, virtually."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.repeated_failure import SURVIVED_S
from resilio_hpc.launch.controller.faults.rank_restarts import AGAIN_S, TOGETHER_S
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

ECHO = "RuntimeError: Connection closed by peer"
TRACE = 'Traceback (most recent call last):\n  File "work.py", line 7, in <module>\n    go()\nValueError: bad'
DEVICE = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def running(nodes: int = 3, spares: int = 0, steps: int = 100_000, **config: object) -> World:
    script = Script(steps=steps, attached=False, alone=True, shows_calls=False)
    world = World(nodes=nodes, spares=spares, script=script, **{"restart_policy": "failed", **config})  # type: ignore[arg-type]
    world.run(lambda: len(world.records("ranks_started")) == nodes)
    world.run(limit_s=1.0)
    return world


def restarted(world: World, times: int) -> None:
    world.run(lambda: len(world.records("rank_restarted")) == times)


def test_a_run_of_ranks_that_fail_completes_in_its_first_round() -> None:
    world = running(steps=300)
    for rank in (1, 4):
        world.fail_rank(rank)
        world.run(limit_s=TOGETHER_S + 1)
    assert world.until_over()["verdict"] == "completed"
    assert [told["rank"] for told in world.records("rank_restarted")] == [1, 4]
    assert len(world.starts) == 1
    assert world.records("recovered") == []


def test_a_rank_may_be_down_when_the_others_have_finished() -> None:
    world = running(steps=100)
    for count in range(1, 4):  # soon after one another, so that it waits for the next start
        world.fail_rank(1)
        if count < 3:
            restarted(world, count)
    assert world.until_over()["verdict"] == "completed"
    assert len(world.records("rank_restarted")) == 3


def test_a_rank_that_fails_soon_waits_longer_each_time() -> None:
    world = running(max_without_progress=9)
    times = []
    for count in range(1, 6):
        world.fail_rank(2)
        failed_at = world.now
        restarted(world, count)
        times.append(world.now - failed_at)
    assert times[0] < 0.5
    assert times[1:] == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.5)


def test_failures_count_until_their_ranks_have_run_for_long_enough() -> None:
    world = running(max_without_progress=2, forgiven_after_s=100.0)
    for rank in (0, 2):
        world.fail_rank(rank)
        world.run(limit_s=60.0)
    assert [told["without_progress"] for told in world.records("decision")] == [1, 2]
    world.run(limit_s=30.0)  # the first one's is forgiven
    world.fail_rank(4)
    restarted(world, 3)
    assert world.records("decision")[-1]["without_progress"] == 2
    world.fail_rank(4)
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["first_failure"]["rank"]) == ("no_progress", 4)


def test_long_after_the_last_failure_all_are_forgiven() -> None:
    world = running(max_without_progress=3, forgiven_after_s=100.0)
    for rank in (0, 2, 4):
        world.fail_rank(rank)
        world.run(limit_s=TOGETHER_S + 1)
    world.run(limit_s=103.0)
    world.fail_rank(5)
    restarted(world, 4)
    assert world.records("decision")[-1]["without_progress"] == 1


def test_ranks_that_all_fail_within_seconds_start_again_together_and_count_once() -> None:
    world = running(nodes=2)
    for rank, message in ((2, ""), (0, ECHO), (1, ECHO), (3, ECHO)):
        world.fail_rank(rank, exit_code=1, signal=None if message else 9, message=message)
        world.run(limit_s=0.5)
    world.run(lambda: len(world.starts) == 2)
    assert [told["rung"] for told in world.records("decision")] == ["restart_rank"] * 3 + ["restart_ranks"]
    assert world.records("decision")[-1]["without_progress"] == 1
    assert world.records("origin")[0]["rank"] == 2


def test_ranks_that_fail_one_after_the_other_never_start_again_together() -> None:
    world = running(nodes=1, max_without_progress=9)
    for count, rank in enumerate((0, 1, 0, 1), 1):
        world.fail_rank(rank)
        world.run(limit_s=TOGETHER_S + 0.5)
        assert len(world.records("rank_restarted")) == count
    assert len(world.starts) == 1


def test_the_only_rank_of_a_run_starts_again_alone() -> None:
    world = running(nodes=1, slots=1)
    world.fail_rank(0)
    restarted(world, 1)
    assert len(world.starts) == 1


@pytest.mark.parametrize("lasted_s", [1.0, SURVIVED_S + 1])
def test_the_same_mistake_again_ends_the_run_unless_the_rank_had_worked(lasted_s: float) -> None:
    world = running()
    for count in range(2):
        world.run(limit_s=lasted_s)
        world.fail_rank(3, exit_code=1, signal=None, message="ValueError: bad", traceback=TRACE)
        if count == 0:
            restarted(world, 1)
    if lasted_s > SURVIVED_S:
        restarted(world, 2)
        return
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["first_failure"]["rank"]) == ("no_progress", 3)
    assert "the same failure again" in verdict["reason"]


def test_the_same_mistake_of_another_rank_is_not_the_same_again() -> None:
    world = running()
    for count, rank in enumerate((3, 5), 1):
        world.fail_rank(rank, exit_code=1, signal=None, message="ValueError: bad", traceback=TRACE)
        restarted(world, count)


def test_a_device_at_fault_gives_its_node_to_a_spare() -> None:
    world = running(spares=1)
    world.fail_rank(3, exit_code=1, signal=None, message=DEVICE, traceback=TRACE)
    world.run(lambda: len(world.starts) == 2)
    assert world.records("decision")[-1]["rung"] == "replace_node"
    assert world.members() == ["n1", "n4", "n3"]


def test_a_lost_node_ends_the_round_while_a_rank_waits_to_start() -> None:
    world = running(nodes=3, spares=1)
    for _ in range(2):
        world.fail_rank(2)
        world.run(limit_s=0.3)
    world.power_off("n1")
    world.run(lambda: len(world.starts) == 2)
    world.run(limit_s=5.0)
    assert [told["rank"] for told in world.records("rank_restarted")] == [2]  # and none in the new round


def test_an_order_that_was_lost_comes_again_and_is_obeyed_once() -> None:
    world = running()
    orders: list[m.RestartRank] = []
    agent = world.agents["n2"]
    hear = agent.core.controller_said

    def loses_the_first(message: m.ToAgent) -> None:
        if isinstance(message, m.RestartRank):
            orders.append(message)
            if len(orders) == 1:
                return
        hear(message)

    agent.core.controller_said = loses_the_first  # type: ignore[method-assign]
    world.fail_rank(2)
    failed_at = world.now
    restarted(world, 1)
    assert AGAIN_S <= world.now - failed_at < AGAIN_S + 0.5
    hear(orders[0])  # late
    world.run(limit_s=3.0)
    assert len(world.records("rank_restarted")) == 1
    assert agent.core.ranks.local is not None
    assert agent.core.ranks.local.ranks[0].restarts == 1


def test_an_agent_that_reconnects_repeats_a_failure_that_is_known() -> None:
    world = running()
    world.fail_rank(2)
    restarted(world, 1)
    agent = world.agents["n2"]
    agent.event(agent.core.ranks.reports.repeat)
    world.run(limit_s=3.0)
    assert len(world.records("rank_failed")) == 1
    assert len(world.records("rank_restarted")) == 1


def test_a_failure_that_comes_late_a_second_time_starts_no_rank_again() -> None:
    world = running(max_without_progress=9)
    said: list[m.RankFailed] = []
    agent = world.agents["n2"]
    world.on_message = lambda _, out, message: said.append(message) if isinstance(message, m.RankFailed) else None  # type: ignore[method-assign]
    for count in (1, 2):
        world.fail_rank(2)
        restarted(world, count)
    agent.event(lambda: agent.to_controller(said[0]))
    world.run(limit_s=5.0)
    assert len(world.records("rank_failed")) == 2
    assert len(world.records("rank_restarted")) == 2


def test_observing_only_a_failure_ends_the_run() -> None:
    world = running(mode=Mode.OBSERVE)
    world.fail_rank(2)
    assert world.until_over()["verdict"] == "failed"
    assert world.records("rank_restarted") == []


def test_a_rank_that_cannot_be_started_again_is_a_failure_of_the_round() -> None:
    world = running()
    world.spawns = False
    world.fail_rank(2)
    world.run(limit_s=0.5)
    world.spawns = True
    agent = world.agents["n2"]
    agent.event(lambda: agent.core.ranks.spawn_failed(0, "cannot fork", agent.unix()))
    world.run(lambda: len(world.starts) == 2)
    assert [told["rung"] for told in world.records("decision")] == ["restart_rank", "restart_ranks"]
