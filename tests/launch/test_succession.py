"""Who is controller: one at a time, the next in line when it is gone, nobody who is merely cut off."""

from __future__ import annotations

from virtual_cluster.ranks import Script
from virtual_cluster.world import World

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.succession import Claim, EpochRecord, Follow, Scan, Succession


def test_the_first_node_of_the_allocation_is_the_first_controller() -> None:
    world = World(nodes=5)
    world.until_step(2)
    assert [(record.epoch, record.node) for record in world.directory.epochs] == [(1, "n1")]


def test_if_the_first_node_never_comes_the_second_leads() -> None:
    world = World(nodes=4, minimum=3, absent=("n1",), join_timeout_s=5.0)
    world.until_step(2)
    assert [record.node for record in world.directory.epochs] == ["n2"]


def test_the_next_in_line_takes_over_exactly_once_and_goes_on_counting() -> None:
    world = World(nodes=4, max_without_progress=3)
    world.until_step(5)
    world.fail_rank(3)
    world.until_round(1)
    world.kill_agent("n1")
    world.run(limit_s=1.5)
    assert [(record.epoch, record.node) for record in world.directory.epochs] == [(1, "n1"), (2, "n2")]
    world.start_agent("n1")
    world.until_round(2)
    assert world.last.state.epoch == 2
    assert (world.last.state.round, world.last.state.restarts, world.last.state.without_progress) == (2, 2, 2)
    assert world.members() == ["n1", "n2", "n3", "n4"]


def test_the_budget_outlives_the_controller_even_if_the_directory_answers_first() -> None:
    world = World(nodes=3, max_without_progress=2, script=Script(save_every=1000))
    for number in range(3):
        world.until_round(number)
        leader = world.controller.node
        world.kill_agent(leader)
        world.run(limit_s=2.0)
        world.start_agent(leader)
    assert world.until_over()["verdict"] == "no_progress"


def test_the_change_of_controller_restores_memory_and_tells_how_long_it_took() -> None:
    world = World(nodes=3)
    world.until_step(25)
    killed_at = world.now
    world.kill_agent("n1")
    world.run(limit_s=1.0)
    world.start_agent("n1")
    world.run(lambda: world.records("recovered") != [])
    told = world.records("recovered")[0]
    assert told["kind"] == "controller_lost"
    assert world.last.restore == m.RestorePoint("memory", 20)
    assert told["lost_steps"] == 5
    assert abs(told["recovery_s"] - (world.now - killed_at)) < 0.7


def test_a_controller_that_loses_power_is_replaced_when_its_pulse_stands_still() -> None:
    world = World(nodes=3, spares=1, heartbeat_timeout_s=5.0)
    world.until_step(12)
    off_at = world.now
    world.power_off("n1")
    world.run(lambda: len(world.directory.epochs) == 2)
    assert 5.0 <= world.now - off_at <= 5.0 + Succession.still_s + 1.0
    world.until_round(1)
    assert world.members() == ["n4", "n2", "n3"]
    assert world.records("recovered")[0]["kind"] == "node_lost"


def test_a_minority_that_is_cut_off_with_the_controller_gives_way() -> None:
    world = World(nodes=4, minimum=1)
    world.until_step(15)
    world.cut("n1")
    world.until_round(1)
    assert world.directory.epochs[-1].node == "n2"
    assert world.members() == ["n2", "n3", "n4"]
    world.run(limit_s=30.0)
    assert len(world.directory.epochs) == 2
    assert world.directory.verdict is None
    assert [controller.node for controller in world.controllers()] == ["n2"]
    world.cut("n1", False)
    world.run(limit_s=10.0)
    assert world.agents["n1"].follows == "n2"
    assert world.members() == ["n2", "n3", "n4"]


def test_of_two_halves_the_controllers_goes_on() -> None:
    world = World(nodes=2, minimum=1)
    world.until_step(15)
    world.cut("n2")
    world.until_round(1)
    assert world.members() == ["n1"]
    world.run(limit_s=20.0)
    assert len(world.directory.epochs) == 1


def test_when_most_nodes_are_really_gone_the_rest_goes_on_after_a_while() -> None:
    world = World(nodes=4, minimum=1)
    world.until_step(15)
    for node in ("n2", "n3", "n4"):
        world.power_off(node)
    world.until_round(1)
    assert world.members() == ["n1"]


def test_a_run_directory_that_fails_for_a_while_delays_the_takeover_only() -> None:
    world = World(nodes=3)
    world.until_step(12)
    world.storage_fails = True
    world.run(limit_s=15.0)
    assert len(world.starts) == 1  # training does not care
    world.kill_agent("n1")
    world.run(limit_s=3.0)
    assert list(world.controllers()) == []
    world.storage_fails = False
    world.start_agent("n1")
    world.until_round(1)
    assert len(world.directory.epochs) == 2


def test_an_agent_follows_and_beats_until_its_controller_is_gone() -> None:
    agent = Succession("b", "job", ["a", "b", "c"], 5.0, now=0.0)
    record = EpochRecord(1, "a", "a:1", "job")
    assert agent.tick(0.0) == Scan()
    assert agent.scanned(record, 1, 0.0) == Follow(record)
    agent.heard(1, ["a", "b", "c"], 0.1)
    assert agent.tick(4.0) is None
    agent.connection_lost(4.0)
    assert agent.tick(4.0) == Scan()
    assert agent.scanned(record, 7, 4.0) is None  # it might only have been the connection
    assert agent.tick(4.3) == Scan()
    assert agent.scanned(record, 7, 4.3) == Claim(2)
    lost = agent.claimed(2, False, None, 4.3)
    assert lost is None
    newer = EpochRecord(2, "c", "c:1", "job")
    assert agent.tick(4.5) == Scan()
    assert agent.scanned(newer, None, 4.5) == Follow(newer)


def test_a_claim_whose_answer_was_lost_is_honoured() -> None:
    agent = Succession("b", "job", ["a", "b"], 5.0, now=0.0)
    first, own = EpochRecord(1, "a", "a:1", "job"), EpochRecord(2, "b", "b:1", "job")
    agent.tick(0.0)
    agent.scanned(first, 1, 0.0)
    agent.heard(1, [], 0.1)
    agent.connection_lost(1.0)
    agent.tick(1.3)
    assert agent.scanned(first, 1, 1.3) == Claim(2)
    agent.storage_failed(1.3)
    assert agent.tick(2.4) == Scan()
    assert agent.scanned(own, None, 2.4) == Follow(own)


def test_epochs_of_an_earlier_job_are_counted_on_and_not_followed() -> None:
    agent = Succession("a", "job2", ["a", "b"], 5.0, now=0.0)
    agent.tick(0.0)
    assert agent.scanned(EpochRecord(7, "b", "b:1", "job1"), 3, 0.0) == Claim(8)


def test_an_agent_does_not_follow_its_dead_predecessor() -> None:
    agent = Succession("a", "job", ["a", "b"], 5.0, now=0.0)
    agent.tick(0.0)
    assert agent.scanned(EpochRecord(3, "a", "a:1", "job"), 3, 0.0) == Claim(4)
