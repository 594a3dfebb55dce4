"""Failures in a virtual cluster: what is noticed, who is blamed, what is tried, when it ends."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.run_state import LEASE_SHARE
from resilio_hpc.launch.controller.facts.state import MAX_LOSSES, Clock
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import Term
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def recovered(world: World) -> dict[str, object]:
    world.run(lambda: world.records("recovered") != [])
    return world.records("recovered")[-1]


def test_a_killed_rank_costs_the_steps_since_the_last_snapshot_and_no_more() -> None:
    world = World(nodes=4)
    world.until_step(27)
    world.fail_rank(5)
    told = recovered(world)
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 20)
    assert (told["kind"], told["node"], told["rank"], told["lost_steps"]) == ("rank_killed", "n3", 5, 7)
    assert told["restored"] == 20
    assert world.members() == ["n1", "n2", "n3", "n4"]


def test_a_failure_before_the_first_snapshot_begins_anew() -> None:
    world = World(nodes=2)
    world.until_step(4)
    world.fail_rank(1, exit_code=3, signal=None, message="ValueError: nan")
    told = recovered(world)
    assert (told["kind"], told["lost_steps"], told["restored"]) == ("rank_exception", 4, -1)
    assert world.last.restore is None


def test_the_origin_is_blamed_though_its_echo_was_heard_first() -> None:
    world = World(nodes=2)
    world.until_step(12)
    world.fail_rank(2, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer")
    world.fail_rank(0, signal=11)
    told = recovered(world)
    assert (told["rank"], told["kind"]) == (0, "rank_killed")


def test_a_lost_node_is_timed_from_when_it_was_last_heard() -> None:
    world = World(nodes=4, spares=1, heartbeat_timeout_s=5.0)
    world.until_step(12)
    off_at = world.now
    world.power_off("n2")
    told = recovered(world)
    assert told["kind"] == "node_lost"
    assert 5.0 <= float(str(told["detection_s"])) <= 5.1
    down_s = world.now - off_at
    assert down_s <= float(str(told["recovery_s"])) <= down_s + 0.7  # it beats every 0.625 s


def test_nodes_that_go_together_are_one_failure_and_one_restart() -> None:
    world = World(nodes=8, spares=4, max_without_progress=1)
    world.until_step(15)
    for node in ("n2", "n3", "n4"):
        world.power_off(node)
    told = recovered(world)
    assert told["node"] == "n2"
    assert world.last.state.restarts == 1
    assert world.members() == ["n1", "n9", "n10", "n11", "n5", "n6", "n7", "n8"]


def test_nodes_that_go_one_after_the_other_are_one_restart_too() -> None:
    world = World(nodes=8, spares=4, max_without_progress=1)
    world.until_step(15)
    for node in ("n2", "n3", "n4"):
        world.power_off(node)
        world.run(limit_s=0.7)
    recovered(world)
    assert len(world.records("round")) > 2
    assert world.last.state.restarts == 1


def lose_and_return(world: World, node: str) -> None:
    """The node is cut off until it is taken for lost, and comes back."""
    before = len(world.records("node_lost"))
    world.cut(node)
    world.run(lambda: len(world.records("node_lost")) > before)
    world.cut(node, False)
    world.run(limit_s=10.0)


def test_a_lost_node_that_comes_back_waits_as_a_spare_also_under_a_new_controller() -> None:
    world = World(nodes=3, spares=1, minimum=2)
    world.until_step(15)
    lose_and_return(world, "n2")
    assert world.members() == ["n1", "n4", "n3"]
    assert world.records("node_returned") == [{"node": "n2", "losses": 1}]
    world.kill_agent("n1")
    world.run(lambda: "n1" not in world.members())
    assert world.members() == ["n2", "n4", "n3"]


def test_a_run_that_had_to_shrink_grows_at_a_commit_when_the_node_is_back() -> None:
    world = World(nodes=3, minimum=2)
    world.until_step(15)
    world.cut("n2")
    world.until_round(1)
    assert world.members() == ["n1", "n3"]
    world.cut("n2", False)
    world.until_round(2)
    assert world.members() == ["n1", "n3", "n2"]
    (regroup,) = world.times("regroup")
    assert min(abs(regroup - at) for at, _ in world.directory.commit_times) < 0.01
    assert (world.last.state.restarts, world.last.state.without_progress) == (1, 0)  # nobody's failure


def test_a_node_that_is_lost_for_the_fourth_time_is_not_used_again_by_later_controllers_either() -> None:
    world = World(nodes=3, spares=1, minimum=2)
    world.until_step(15)
    for _ in range(MAX_LOSSES + 1):
        lose_and_return(world, "n2")
    assert [told["losses"] for told in world.records("node_returned")] == [1, 2, 3]
    assert "n2" in world.controller.run.agents  # it came again, and waits
    world.fail_rank(2)  # with each start of the ranks, agents learn what a later controller must know
    world.run(limit_s=1.0)
    world.kill_agent("n1")
    world.run(lambda: "n1" not in world.members())
    assert "n2" in world.controller.run.agents
    assert world.members() == ["n4", "n3"]


@pytest.mark.parametrize("answers", [0, 1])
def test_a_node_that_was_there_before_it_was_known_as_lost_is_taken_back(answers: int) -> None:
    world = World(nodes=2)
    term = Term(2, "n1", "n1:1", first_membership(("n1", "n2")))
    controller = Controller(world.config, term, Clock(lambda: world.now, world.unix))
    lost = m.RoundState(1, 5, m.world_of(()), 0, 0, (), ("n2",), losses=(("n2", 1),))
    for turn, (node, last) in enumerate((("n2", None), ("n1", lost))):
        controller.handle(m.Hello(node, f"{node}.1", 2, f"{node}:1", node, 1, last=last))
        assert turn == 0 or controller.run.lost == (set() if answers == 0 else {"n2"})
        if turn == answers:
            controller.handle(m.Heartbeat("n2", "n2.1", 2, 0.0, -1, world.now))
    assert (controller.run.round, controller.run.lost, controller.run.losses) == (5, set(), {"n2": 1})


@pytest.mark.parametrize("first", ["n1", "n3"])
def test_that_ranks_report_steps_is_taken_from_any_node_since_a_spare_does_not_know_it(first: str) -> None:
    world = World(nodes=2, spares=1)
    term = Term(2, "n1", "n1:1", first_membership(("n1", "n2", "n3")))
    controller = Controller(world.config, term, Clock(lambda: world.now, world.unix))
    of_a_spare = m.RoundState(
        1, 0, m.world_of((m.Member("n1", 0, "n1", 2, 0), m.Member("n2", 1, "n2", 2, 2))), 0, 0, ()
    )
    of_a_member = msgspec.structs.replace(of_a_spare, steps_reported=True)
    for node in sorted(("n1", "n3"), key=lambda node: node != first):
        last = of_a_member if node == "n1" else of_a_spare
        controller.handle(m.Hello(node, f"{node}.1", 2, f"{node}:1", node, 2, last=last))
    assert controller.run.steps_reported


def led_by_n1(world: World) -> Controller:
    """A controller with its own agent and n2, both heard now."""
    term = Term(1, "n1", "n1:1", first_membership(("n1", "n2", "n3")), first=True)
    controller = Controller(world.config, term, Clock(lambda: world.now, world.unix))
    for node in ("n1", "n2", "n3"):
        controller.handle(m.Hello(node, f"{node}.1", 1, f"{node}:1", node, 1))
    return controller


def beats(controller: Controller, world: World, seconds: float, behind: bool = False, step_s: float = 0.1) -> None:
    """n1 and n2 are heard for so long, n3 is not."""
    until = world.now + seconds
    while world.now < until:
        world.now += step_s
        for node in ("n1", "n2"):
            controller.handle(m.Heartbeat(node, f"{node}.1", 1, 0.0, -1, world.now))
        controller.tick(behind)


def test_nobody_is_lost_while_messages_wait_that_were_not_read() -> None:
    world = World(nodes=3)
    controller = led_by_n1(world)
    timeout_s = world.config.heartbeat_timeout_s
    beats(controller, world, 2 * timeout_s, behind=True)
    assert controller.run.leads
    assert controller.run.lost == set()
    beats(controller, world, timeout_s)
    assert controller.run.lost == {"n3"}


def test_a_controller_that_was_stopped_hears_what_waited_before_it_judges() -> None:
    world = World(nodes=3)
    controller = led_by_n1(world)
    world.now += world.config.heartbeat_timeout_s + 1.0
    beats(controller, world, 0.2)
    assert controller.run.leads
    controller.handle(m.Heartbeat("n3", "n3.1", 1, 0.0, -1, world.now))  # its sockets had slept, too
    beats(controller, world, 1.0)
    assert controller.run.lost == set()


def test_a_returned_node_takes_nobodys_place() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(15)
    lose_and_return(world, "n2")
    world.fail_rank(2)
    world.until_round(2)
    assert world.members() == ["n1", "n4", "n3"]
    world.kill_agent("n1")  # the controller's
    world.run(limit_s=0.2)
    world.start_agent("n1")
    world.until_round(3)
    assert world.controller.run.node == "n4"
    assert world.members() == ["n1", "n4", "n3"]


def test_a_node_that_is_cut_off_stops_its_ranks_before_others_take_its_place() -> None:
    world = World(nodes=3, spares=1, heartbeat_timeout_s=5.0)
    world.until_step(15)
    cut_at = world.now
    world.cut("n2")
    world.run(lambda: not world.agents["n2"].rank_rounds())
    assert world.now - cut_at <= 5.0 * LEASE_SHARE + 0.1
    assert world.records("node_lost") == []
    world.until_round(1)


def test_a_node_that_is_cut_off_takes_nothing_over() -> None:
    world = World(nodes=3, spares=1, minimum=1)
    world.until_step(15)
    world.cut("n3")
    world.run(limit_s=30.0)
    assert [record.node for record in world.directory.epochs] == ["n1"]
    assert world.directory.verdict is None
    assert world.members() == ["n1", "n2", "n4"]


def test_a_short_cut_that_cost_the_ranks_their_lease_is_noticed() -> None:
    world = World(nodes=2, heartbeat_timeout_s=5.0)
    world.until_step(15)
    world.cut("n2")
    world.run(lambda: world.records("lease_ended") != [])
    world.cut("n2", False)
    world.break_connection("n2")
    told = recovered(world)
    assert (told["kind"], told["node"]) == ("lease_ended", "n2")
    assert world.records("node_lost") == []


def test_an_agent_that_is_restarted_on_a_fine_node_keeps_its_place_and_its_snapshots() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(25)
    world.kill_agent("n2")
    world.run(limit_s=1.0)
    world.start_agent("n2")
    told = recovered(world)
    assert (told["kind"], told["node"]) == ("agent_lost", "n2")
    assert world.members() == ["n1", "n2", "n3"]
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 20)


def test_restarts_without_progress_end_with_the_failure_that_caused_them() -> None:
    world = World(nodes=2, max_without_progress=2, script=Script(save_every=1000))
    for number in range(3):
        world.run(lambda number=number: world.starts != [] and world.step >= 3 and world.last.state.round == number)  # type: ignore[misc]
        world.fail_rank(3, exit_code=1, signal=None, message=f"ValueError: life {number}")
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["exit_code"]) == ("no_progress", 1)
    assert (verdict["first_failure"]["rank"], verdict["first_failure"]["message"]) == (3, "ValueError: life 2")
    assert len(world.starts) == 3


def test_a_commit_gives_the_whole_budget_back() -> None:
    world = World(nodes=2, max_without_progress=1, script=Script(save_every=5))
    for number in range(4):
        world.until_round(number)
        before = len(world.directory.committed)
        world.run(lambda before=before: len(world.directory.committed) > before)  # type: ignore[misc]
        world.fail_rank(1)
    world.until_round(4)
    assert world.last.state.restarts == 4


def test_an_order_to_commit_that_comes_after_the_end_of_the_lease_is_refused() -> None:
    world = World(nodes=2)
    world.until_step(12)
    agent = world.agents["n1"]
    agent.core.ranks.lease = agent.monotonic() - 0.1  # it stood still
    agent.core.controller_said(m.CommitStep(1, 0, 12, 4, ()))
    assert isinstance(agent.said[-1], m.PersistFailed)
    world.run(limit_s=0.2)
    assert 12 not in world.directory.committed


def test_a_spawner_that_dies_costs_one_restart() -> None:
    world = World(nodes=2)
    world.until_step(15)
    agent = world.agents["n2"]
    agent.spawner_dies()
    assert recovered(world)["kind"] == "spawner_lost"
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 10)


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_a_broken_connection_that_comes_again_costs_nothing(node: str) -> None:
    world = World(nodes=3, script=Script(steps=60))
    for step in (5, 17, 31):
        world.until_step(step)
        world.break_connection(node)
    assert world.until_over()["verdict"] == "completed"
    assert len(world.starts) == len(world.directory.epochs) == 1


def test_a_connection_that_breaks_while_ranks_are_started_holds_nothing_up() -> None:
    for offset in (0.0, 0.012, 0.025, 0.2):
        world = World(nodes=3)
        world.until_step(5)
        world.fail_rank(0)
        world.run(limit_s=offset)
        world.cut("n3")  # orders and answers on their way are lost
        world.run(limit_s=0.03)
        world.cut("n3", False)
        world.break_connection("n3")
        world.until_round(1, limit_s=5.0)
        assert world.members() == ["n1", "n2", "n3"]


def test_the_last_words_before_a_broken_connection_are_said_again() -> None:
    world = World(nodes=2, script=Script(steps=12))
    world.until_step(11)
    world.cut("n2")
    world.run(lambda: world.step >= 12)
    world.run(limit_s=0.5)
    assert world.directory.verdict is None
    world.cut("n2", False)
    world.break_connection("n2")
    assert world.until_over()["verdict"] == "completed"


def test_an_agent_that_missed_the_end_learns_it_from_the_run_directory() -> None:
    world = World(nodes=3, minimum=1, script=Script(steps=12))
    world.run(lambda: any(isinstance(x, m.RanksDone) for x in world.agents["n3"].said))
    world.run(lambda: len(world.records("agent_ends")) == 0 and world.directory.verdict is not None)
    world.cut("n3")
    world.run(lambda: set(world.agents) == {"n3"})
    world.cut("n3", False)
    assert world.until_over()["verdict"] == "completed"
    assert len(world.starts) == 1
    assert world.records("agent_ends")[-1] == {"node": "n3", "verdict": "completed", "exit_code": 0}


def test_the_controllers_own_agent_leaves_last() -> None:
    world = World(nodes=4, script=Script(steps=12))
    world.until_over()
    assert world.records("agent_ends")[-1]["node"] == "n1"


def test_the_controller_waits_a_moment_for_who_missed_the_end() -> None:
    world = World(nodes=3, script=Script(steps=12))
    world.run(lambda: world.directory.verdict is not None)
    world.cut("n3")
    world.run(limit_s=1.0)
    world.cut("n3", False)
    world.break_connection("n3")
    world.until_over()
    assert len(world.directory.epochs) == 1


def test_nobody_is_let_go_before_the_verdict_is_durable() -> None:
    world = World(nodes=2, script=Script(steps=12))
    world.until_step(8)
    world.storage_fails = True
    world.run(limit_s=4.0)
    assert world.records("agent_ends") == []
    world.storage_fails = False
    assert world.until_over()["verdict"] == "completed"


def test_newer_steps_in_memory_are_progress_unless_saves_fail() -> None:
    world = World(nodes=2)
    world.until_step(12)
    run = world.controller.run
    run.without_progress = 2
    run.committed_steps.add(20)
    run.goes_on_from(20)  # as before
    assert run.without_progress == 2
    run.goes_on_from(25)
    assert run.without_progress == 0
    run.without_progress, run.saves_fail = 2, True
    run.goes_on_from(30)
    assert run.without_progress == 2
