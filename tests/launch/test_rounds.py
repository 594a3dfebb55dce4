"""Rounds in a virtual cluster: who starts when, and with what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.facts.state import Record
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.network import Connection
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

RECORD = ShardRecord(0, "node-0.h5", 1, "own", ())


def test_a_round_starts_as_soon_as_its_members_are_in() -> None:
    world = World(nodes=4)
    world.run(lambda: bool(world.starts))
    joined, (started, _) = max(world.times("agent_joined")), world.starts[0]
    assert started - joined < 0.3  # a few turns of its loop: the quorum must be proven first
    assert world.members() == ["n1", "n2", "n3", "n4"]


def test_a_run_completes_and_everybody_leaves() -> None:
    world = World(nodes=3, spares=1, script=Script(steps=25))
    assert world.until_over()["verdict"] == "completed"
    assert world.records("recovered") == []
    assert {fields["node"] for fields in world.records("agent_ends")} == {"n1", "n2", "n3", "n4"}


def test_a_plain_script_completes_and_may_exit_with_0_at_any_time() -> None:
    world = World(nodes=2, script=Script(steps=5, attached=False))
    assert world.until_over()["verdict"] == "completed"


def test_an_attached_rank_that_exits_with_0_too_early_has_failed() -> None:
    world = World(nodes=2, script=Script(steps=20, exits_early_at=7))
    assert world.until_over()["verdict"] == "completed"
    (failed,) = world.records("rank_failed")
    assert (failed["kind"], failed["rank"], failed["exit_code"]) == ("early_exit", 0, 0)
    assert world.records("recovered")[0]["kind"] == "early_exit"


def test_with_minimum_and_maximum_the_round_waits_for_the_join_timeout_only() -> None:
    world = World(nodes=4, minimum=2, absent=("n4",), join_timeout_s=8.0)
    world.run(lambda: bool(world.starts))
    assert 8.0 <= world.starts[0][0] - 1000.0 < 8.5
    assert world.members() == ["n1", "n2", "n3"]


def test_too_few_nodes_end_in_a_verdict() -> None:
    world = World(nodes=4, minimum=3, absent=("n3", "n4"), join_timeout_s=5.0)
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["exit_code"]) == ("not_enough_nodes", 1)


def test_a_node_unit_trims_the_round_and_the_rest_waits() -> None:
    world = World(nodes=6, minimum=2, unit=2, absent=("n6",), join_timeout_s=2.0)
    world.until_step(3)
    assert world.members() == ["n1", "n2", "n3", "n4"]
    world.power_off("n2")
    world.until_round(1)
    assert world.members() == ["n1", "n5", "n3", "n4"]
    world.power_off("n5")
    world.until_round(2)
    assert world.members() == ["n1", "n3"]


def test_a_spare_takes_the_vacant_node_rank_and_survivors_keep_theirs() -> None:
    world = World(nodes=4, spares=2)
    world.until_step(15)
    world.power_off("n3")
    world.until_round(1)
    assert world.members() == ["n1", "n2", "n5", "n4"]
    assert world.records("decision")[-1]["rung"] == "replace_node"


def test_without_a_spare_an_elastic_round_shrinks() -> None:
    world = World(nodes=4, minimum=2)
    world.until_step(15)
    world.power_off("n2")
    world.until_round(1)
    assert world.members() == ["n1", "n3", "n4"]
    assert world.records("decision")[-1]["rung"] == "shrink"
    assert world.last.restore == m.RestorePoint(Tier.COMMITTED, 10)


def test_without_a_spare_a_fixed_round_ends_or_leaves_it_to_the_next_job() -> None:
    for chained, verdict, code in ((False, "not_enough_nodes", 1), (True, "needs_new_job", 75)):
        world = World(nodes=3, chained=chained)
        world.until_step(5)
        world.power_off("n2")
        ended = world.until_over()
        assert (ended["verdict"], ended["exit_code"]) == (verdict, code)


def test_a_start_that_takes_too_long_is_tried_again() -> None:
    world = World(nodes=2, start_timeout_s=5.0)
    world.until_step(12)
    world.spawns = False
    world.fail_rank(1)
    world.run(lambda: bool(world.records("slow_start")))
    world.spawns = True
    world.run(lambda: world.records("recovered") != [])
    assert world.records("recovered")[0]["kind"] == "rank_killed"
    assert len(world.records("round")) == 3


def test_ranks_that_are_started_may_take_any_time_to_their_first_step() -> None:
    """A large model is built, read, and compiled after a failure, too."""
    world = World(nodes=2, start_timeout_s=5.0, script=Script(start_s=50.0))
    world.until_step(12)
    world.fail_rank(1)
    world.run(lambda: world.records("recovered") != [], limit_s=100.0)
    assert world.records("slow_start") == []
    assert len(world.records("round")) == 2


def test_ranks_of_a_plain_script_that_are_not_started_in_time_are_tried_again_too() -> None:
    world = World(nodes=2, start_timeout_s=5.0, script=Script(steps=20, attached=False))
    world.spawns = False
    world.run(lambda: bool(world.records("slow_start")))
    world.spawns = True
    assert world.until_over()["verdict"] == "completed"


def test_a_store_that_dies_before_the_ranks_run_is_opened_again() -> None:
    world = World(nodes=2, start_timeout_s=600.0)
    world.run(lambda: any(isinstance(x, m.Prepare) for x in world.agents["n1"].heard))
    world.agents["n1"].core.ranks.store_died(0, "address in use", world.unix())
    world.until_round(1, limit_s=5.0)
    assert world.records("rank_failed")[0]["kind"] == "store_lost"


def test_a_restarted_store_host_opens_a_new_store_before_anybody_starts() -> None:
    world = World(nodes=2)
    world.until_step(3)
    world.kill_agent("n1")
    world.run(limit_s=1.0)
    world.start_agent("n1")  # the controller is n2 now, the store is on n1 again
    world.until_round(1)
    world.fail_rank(2)
    world.run(lambda: len(world.records("round")) == 3)
    world.run(limit_s=0.015)  # the store is open, n2's ranks are still being stopped
    assert any(isinstance(x, m.StoreOpened) and x.round == 2 for x in world.agents["n1"].said)
    assert len(world.starts) == 2
    world.kill_agent("n1")
    world.start_agent("n1")
    world.until_round(2)  # the virtual cluster refuses a start with a store that is gone


def test_messages_of_older_rounds_and_epochs_change_nothing() -> None:
    world = World(nodes=2)
    world.until_step(5)
    world.fail_rank(0)
    world.until_round(1)
    controller, before = world.controller, world.controller.run.round
    old = m.RankFailure("n2", 2, 0, "signal", world.unix(), signal=9)
    stale = [
        m.RankFailed("n2", 1, 0, old), m.RankFailed("n2", 0, 1, old), m.RanksDone("n2", 1, 0, False, -1, -1),
        m.FirstStep("n2", 1, 0, 1, world.unix()), m.StepPersisted("n2", 1, 0, 10, RECORD),
        m.RanksStopped("n2", 1, 0, ()),
    ]  # fmt: skip
    for message in stale:
        controller.handle(message)
    assert (controller.run.phase, controller.run.round) == ("running", before)
    agent = world.agents["n2"].core
    for order in (m.Prepare(1, 0, False), m.Prepare(0, 9, False), m.End(0, "completed", 0)):
        agent.controller_said(order)
    world.run(limit_s=2.0)
    assert len(world.starts) == 2
    assert world.agents["n2"].rank_rounds() == {1}


def test_a_rank_that_misses_another_while_a_planned_change_stops_them_has_not_failed() -> None:
    world = World(nodes=3, minimum=2, absent=("n3",), join_timeout_s=2.0, script=Script(steps=60))
    world.until_step(5)
    missed = m.RankFailure("n2", 2, 0, "exit", world.unix(), exit_code=1, message="ConnectionResetError")
    world.start_agent("n3")
    world.run(lambda: world.controller.run.round == 1)
    (recorded,) = world.controller.handle(m.RankFailed("n2", 1, 0, missed))
    assert isinstance(recorded, Record) and recorded.kind == "stopped_rank_failed"
    assert recorded.fields["message"] == "ConnectionResetError"
    assert world.until_over()["verdict"] == "completed"
    assert (world.records("rank_failed"), world.records("recovered")) == ([], [])


def test_a_spare_that_comes_late_to_a_new_controller_is_waited_for() -> None:
    world = World(nodes=4, spares=1, heartbeat_timeout_s=5.0)
    world.until_step(15)
    world.power_off("n1")
    world.cut("n5")
    world.run(lambda: len(world.records("controller")) == 2)
    world.run(limit_s=3.0)
    assert world.records("verdict") == [], "nobody gives up while it may still come"
    world.cut("n5", cut=False)
    world.until_round(1)
    assert sorted(world.members()) == ["n2", "n3", "n4", "n5"]


def test_a_run_grows_only_when_the_newcomers_ranks_would_start_at_once() -> None:
    world = World(nodes=3, minimum=2, absent=("n3",), join_timeout_s=2.0, script=Script(steps=400))
    world.until_step(5)
    world.start_agent("n3")
    world.agents["n3"].core.ranks.ready = False  # it imports
    world.run(lambda: len(world.directory.commit_times) >= 4)
    assert world.members() == ["n1", "n2"]
    world.agents["n3"].core.ranks.ready = True
    world.until_round(1)
    assert world.members() == ["n1", "n2", "n3"]
    (regrouped,) = world.times("regroup")
    assert any(0 <= regrouped - at < 0.01 for at, _ in world.directory.commit_times)


def test_before_a_run_gives_up_a_node_that_was_just_lost_may_come_back() -> None:
    world = World(nodes=3, script=Script(steps=60))
    world.until_step(15)
    world.kill_agent("n2", silently=True)
    world.run(lambda: bool(world.records("node_lost")))
    world.run(limit_s=10.0)
    world.start_agent("n2")
    world.until_round(1)
    assert sorted(world.members()) == ["n1", "n2", "n3"]
    assert [told["rung"] for told in world.records("decision")] == ["wait_for_node", "replace_node"]
    assert world.until_over()["verdict"] == "completed"


def test_nobody_waits_longer_for_a_lost_node_when_the_clock_is_set_back() -> None:
    world = World(nodes=3)
    world.until_step(15)
    world.power_off("n2")
    world.run(lambda: bool(world.records("node_lost")))
    lost_at, world.unix = world.now, lambda: 1_700_000_000.0 - 7200.0  # type: ignore[method-assign]
    assert world.until_over()["verdict"] == "not_enough_nodes"
    assert world.now - lost_at < 40.0


@pytest.mark.parametrize("order", [m.Prepare, m.Start])
def test_an_order_that_never_arrived_is_said_again(order: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gone to a connection that was given up at its other end."""
    world = World(nodes=3)
    deaf_until = world.now + 3.0
    hear = VirtualAgent._hear

    def misses(agent: VirtualAgent, message: m.ToAgent) -> None:
        if not (agent.node == "n2" and isinstance(message, order) and world.now < deaf_until):
            hear(agent, message)

    monkeypatch.setattr(VirtualAgent, "_hear", misses)
    world.until_step(1)
    assert deaf_until < world.now < deaf_until + 2.0
    assert world.records("slow_start") == world.records("recovery") == []


def test_a_node_that_is_heard_but_hears_nothing_is_lost_and_comes_back_when_it_answers() -> None:
    world = World(nodes=3, minimum=2, heartbeat_timeout_s=3.0)
    to_caller, deaf = world.network.to_caller, ["n2"]

    def one_way(connection: Connection, deliver: Callable[[], None]) -> None:
        if connection.caller.node not in deaf:
            to_caller(connection, deliver)

    world.network.to_caller = one_way  # type: ignore[method-assign]
    began = world.now
    world.until_step(1)
    assert world.members() == ["n1", "n3"]
    assert world.now - began < 8.0
    world.run(limit_s=40.0)
    assert world.records("node_returned") == []
    deaf.clear()
    world.run(lambda: "n2" in world.members())
    assert [told["losses"] for told in world.records("node_returned")] == [1]
