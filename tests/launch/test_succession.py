"""Who is controller: one at a time, the next in line when it is gone, nobody who is merely cut off."""

from __future__ import annotations

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.state import Clock
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import Term
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


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
        leader = world.controller.run.node
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
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 20)
    assert told["lost_steps"] == 5
    assert abs(told["recovery_s"] - (world.now - killed_at)) < 0.7


def test_a_controller_that_loses_power_is_replaced_when_it_has_been_silent_for_too_long() -> None:
    world = World(nodes=3, spares=1, heartbeat_timeout_s=5.0)
    world.until_step(12)
    off_at = world.now
    world.power_off("n1")
    world.run(lambda: len(world.directory.epochs) == 2)
    assert 5.0 <= world.now - off_at <= 6.5
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
    assert [controller.run.node for controller in world.controllers()] == ["n2"]
    world.cut("n1", False)
    world.run(lambda: world.agents["n1"].follows == "n2" and "n1" in world.members())
    assert world.members() == ["n2", "n3", "n4", "n1"]  # it is taken in at a commit
    assert world.directory.verdict is None


def test_of_two_halves_the_one_with_the_witness_goes_on() -> None:
    world = World(nodes=2, minimum=1)
    world.until_step(15)
    world.cut("n2")
    world.until_round(1)
    (winner,) = world.directory.witnesses.values()
    assert world.members() == [winner]
    world.run(limit_s=60.0)
    assert world.directory.epochs[-1].node == winner
    assert world.members() == [winner]
    assert len(world.directory.epochs) == 2


def test_half_that_comes_when_the_half_with_the_witness_is_gone_ends_in_a_verdict() -> None:
    world = World(nodes=2, minimum=1, absent=("n1",), join_timeout_s=5.0)
    world.until_step(3)
    assert world.directory.witnesses == {"0.0": "n2"}
    world.power_off("n2")
    world.start_agent("n1")
    world.run(lambda: world.directory.verdict is not None, limit_s=400.0)
    assert world.directory.said == ("quorum_lost", 1)
    assert len(world.directory.epochs) == 2


def test_a_node_that_may_not_follow_the_newest_epoch_ends_the_run_when_that_epoch_is_gone() -> None:
    """Only it has heard of the voters, so another node began an epoch without their votes, and then was lost."""
    world = World(nodes=3, minimum=1)
    world.run(lambda: world.agents["n1"].core.vote_record.membership.number == 1)
    world.cut("n1")
    world.power_off("n3")
    world.run(lambda: len(world.directory.epochs) == 2)
    world.power_off("n2")
    world.cut("n1", False)
    verdict = world.until_over(limit_s=400.0)
    assert (verdict["verdict"], world.directory.epochs[-1].epoch, world.starts) == ("quorum_lost", 3, [])


def test_halves_of_four_are_decided_by_one_witness_too() -> None:
    world = World(nodes=4, minimum=1)
    world.until_step(15)
    reaches = world.network.reaches
    sides = {"n1": 0, "n2": 1, "n3": 1, "n4": 0}
    world.network.reaches = lambda one, other: sides[one] == sides[other] and reaches(one, other)  # type: ignore[method-assign]
    world.until_round(1)
    (winner,) = world.directory.witnesses.values()
    assert sorted(world.members()) == [node for node in sides if sides[node] == sides[winner]]
    world.run(limit_s=60.0)
    assert world.directory.epochs[-1].node == winner


def test_less_than_half_never_goes_on_and_ends_in_a_verdict() -> None:
    world = World(nodes=4, minimum=1)
    world.until_step(15)
    for node in ("n2", "n3", "n4"):
        world.power_off(node)
    verdict = world.until_over(limit_s=400.0)
    assert (verdict["verdict"], verdict["exit_code"]) == ("quorum_lost", 1)
    assert len(world.starts) == 1


def test_a_hung_run_directory_delays_commits_and_no_change_of_controller() -> None:
    world = World(nodes=3)
    world.until_step(12)
    world.storage_fails = True
    world.run(limit_s=15.0)
    assert len(world.starts) == 1  # training does not care
    world.kill_agent("n1")
    world.run(limit_s=0.5)
    world.start_agent("n1")
    world.until_round(1)
    assert [record.epoch for record in world.directory.epochs] == [1]
    before = dict(world.directory.committed)
    world.run(limit_s=10.0)
    assert world.directory.committed == before, "older epochs are not yet fenced off"
    world.storage_fails = False
    world.run(lambda: len(world.directory.committed) > len(before))
    assert [record.epoch for record in world.directory.epochs] == [1, 2]


def test_a_node_with_one_bad_link_disturbs_nobody() -> None:
    world = World(nodes=3, minimum=1)
    world.until_step(15)
    reaches = world.network.reaches
    bad = {"n1", "n3"}
    world.network.reaches = lambda one, other: {one, other} != bad and reaches(one, other)  # type: ignore[method-assign]
    world.until_round(1)
    assert world.members() == ["n1", "n2"]
    world.run(limit_s=60.0)
    assert len(world.directory.epochs) == 1
    assert world.controller.run.node == "n1"


def test_an_agent_that_is_restarted_keeps_its_promise() -> None:
    world = World(nodes=3)
    world.until_step(15)
    world.kill_agent("n1")
    world.run(lambda: world.sites["n3"].vote_record.promised == 2)  # type: ignore[union-attr]
    world.kill_agent("n3")
    world.start_agent("n3")
    world.start_agent("n1")
    assert world.agents["n3"].core.vote_record.promised_to == "n2"
    world.until_round(1)
    assert len({record.epoch for record in world.directory.epochs}) == len(world.directory.epochs)


def test_before_its_first_round_a_new_controller_waits_for_leases_that_nobody_with_it_knows_of() -> None:
    world = World(nodes=3, minimum=2, join_timeout_s=0.5, heartbeat_timeout_s=5.0)
    world.run(lambda: all(site.vote_record and site.vote_record.membership.epoch for site in world.sites.values()))
    for node in ("n1", "n2"):
        world.kill_agent(node)
    world.power_off("n3")  # for all that is known, the start of a round has reached n3 alone
    assert world.starts == []
    for node in ("n1", "n2"):
        world.start_agent(node)
    world.run(lambda: len(world.directory.epochs) > 1)
    elected_at = world.now
    world.until_step(1)
    assert world.members() == ["n1", "n2"]
    assert world.starts[0][0] - elected_at > 4.0


def test_ranks_that_need_the_hung_run_directory_wait_for_it_and_lose_no_step_that_only_it_knows() -> None:
    world = World(nodes=3, minimum=2, script=Script(steps=60))
    world.until_step(15)
    world.storage_fails = True
    world.power_off("n1")  # a shrunk world cannot restore from memory
    world.run(lambda: bool(world.records("uninformed")))
    world.run(limit_s=20.0)
    assert len(world.starts) == 1
    world.storage_fails = False
    world.until_round(1)
    assert world.last.restore is not None and world.last.restore.step == max(world.directory.committed)
    assert world.records("slow_start") == []
    assert world.until_over()["verdict"] == "completed"


def test_a_controller_does_not_take_its_own_agents_support_for_granted() -> None:
    world = World(nodes=2)
    term = Term(1, "n1", "n1:1", first_membership(("n1", "n2")), first=True)
    controller = Controller(world.config, term, Clock(lambda: world.now, world.unix))
    for node in ("n1", "n2"):
        controller.handle(m.Hello(node, f"{node}.1", 1, f"{node}:1", node, 1))
    for node in ("n2", "n1"):  # it may have given its vote to somebody else
        controller.tick()
        assert not controller.run.leads
        controller.handle(m.Heartbeat(node, f"{node}.1", 1, 0.0, -1, world.now))
        world.now += 1.0
    controller.tick()
    assert controller.run.leads
