"""Tests of the nodes of a run, in a virtual cluster: ranks pause, and go on, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from resilio_hpc.core.rank_link import PAUSED
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.members.node_tests import START_S
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def paused(world: World) -> bool:
    return any(agent.core.ranks.local and agent.core.ranks.local.section == PAUSED for agent in world.agents.values())


def until_paused(world: World, replace: bool = False) -> None:
    world.until_step(25)
    world.test_nodes(replace)
    world.run(lambda: world.records("paused") != [])


def outcome(world: World) -> str:
    (tested,) = world.records("tested")
    return str(tested["outcome"])


def goes_on(world: World) -> None:
    """The same round does more steps, and nothing was taken for a hang."""
    world.until_step(world.step + 20)
    assert len(world.starts) == 1
    assert not paused(world)
    assert [world.records(kind) for kind in ("stalled", "hang", "recovered")] == [[], [], []]


def test_ranks_pause_for_a_test_and_go_on() -> None:
    world = World(nodes=3)
    until_paused(world)
    step = world.step
    assert step == world.records("paused")[0]["step"]
    world.run(lambda: world.records("pause_ended") != [])
    assert world.step == step  # none trained meanwhile
    assert 3.0 <= world.records("pause_ended")[0]["seconds"] < 4.0
    assert outcome(world) == "fine"
    goes_on(world)


def test_a_test_that_takes_a_hundred_times_as_long_as_a_step_is_no_hang() -> None:
    world = World(nodes=2)
    world.testing_s = 50.0
    until_paused(world)
    world.run(lambda: world.records("pause_ended") != [], limit_s=70)
    goes_on(world)


def test_a_slow_node_is_told_and_kept_unless_it_is_to_be_replaced() -> None:
    world = World(nodes=3, spares=1)
    world.slow_nodes = {"n2"}
    until_paused(world)
    world.run(lambda: world.records("pause_ended") != [])
    (tested,) = world.records("tested")
    assert (tested["slow"], tested["replaced"]) == (["n2"], [])
    goes_on(world)


def test_a_slow_node_is_replaced_by_a_spare_after_a_commit_and_no_step_is_lost() -> None:
    world = World(nodes=3, spares=1)
    world.slow_nodes = {"n2"}
    until_paused(world, replace=True)
    world.until_round(1)
    assert world.members() == ["n1", "n4", "n3"]
    (regroup,) = world.records("regroup")
    assert "n2" in regroup["reason"]
    assert world.last.restore is not None
    assert world.last.restore.step == max(world.directory.committed)
    world.kill_agent("n1")  # the next controller knows it, too
    world.start_agent("n1")
    world.until_round(2)
    assert "n2" not in world.members()


def test_a_slow_node_is_kept_where_too_few_would_be_left() -> None:
    world = World(nodes=3)
    world.slow_nodes = {"n2"}
    until_paused(world, replace=True)
    world.run(lambda: world.records("pause_ended") != [])
    assert world.records("tested")[0]["replaced"] == []
    goes_on(world)


def test_the_run_shrinks_where_it_is_faster_without_the_slow_node() -> None:
    world = World(nodes=4, minimum=2)
    world.slow_nodes = {"n2"}
    until_paused(world, replace=True)
    world.until_round(1)
    assert world.members() == ["n1", "n3", "n4"]


def test_a_spare_that_is_slow_is_not_taken_later() -> None:
    world = World(nodes=2, spares=2)
    world.slow_nodes = {"n3"}
    until_paused(world, replace=True)
    world.run(lambda: world.records("pause_ended") != [])
    world.power_off("n2")
    world.until_round(1)
    assert world.members() == ["n1", "n4"]


@pytest.mark.parametrize("during", ["start", "pause"])
@pytest.mark.parametrize("fault", ["rank", "node", "controller", "stop", "leave"])
def test_whatever_happens_during_a_test_ranks_train_or_stop_in_order(during: str, fault: str) -> None:
    world = World(nodes=3, spares=1, script=Script(steps=400))
    world.until_step(25)
    world.test_nodes()
    world.run(lambda: world.records("test_begun" if during == "start" else "paused") != [])
    if fault == "rank":
        world.fail_rank(3)
    elif fault == "node":
        world.power_off("n3")
    elif fault == "controller":
        world.kill_agent("n1")
        world.start_agent("n1")
    elif fault == "stop":
        world.warn("TERM")
    else:
        world.break_connection("n2")
    if fault == "stop":
        assert world.until_over()["verdict"] == "terminated"
        assert max(world.directory.committed) > 25  # it stopped after an agreed step, and saved there
        return
    if fault != "leave":
        world.until_round(1)
    world.until_step(60)
    world.run(lambda: not paused(world))
    assert world.records("stalled") == []
    assert world.until_over()["verdict"] == "completed"


def test_ranks_go_on_where_the_order_to_do_so_is_lost() -> None:
    world = World(nodes=3)
    until_paused(world)
    world.run(lambda: world.records("tested") == [] and world.now > world.times("paused")[0] + 2.9)
    world.cut("n2")
    world.run(lambda: world.records("pause_ended") != [])
    world.run(limit_s=0.5)
    world.cut("n2", False)
    world.until_step(world.step + 10)
    assert not paused(world)


def test_a_test_that_gives_no_result_ends_the_pause() -> None:
    world = World(nodes=2)
    world.test_fails = "its coordinator ended"
    until_paused(world)
    world.run(lambda: world.records("pause_ended") != [])
    assert outcome(world) == "failed"
    goes_on(world)


def test_a_test_that_never_ends_ends_the_pause() -> None:
    world = World(nodes=2)
    world.testing_s = 1e6
    until_paused(world)
    world.run(lambda: world.records("pause_ended") != [], limit_s=100)
    assert outcome(world) == "failed"
    goes_on(world)


def test_probers_that_do_not_come_up_cost_no_pause() -> None:
    world = World(nodes=2, script=Script(steps=5000))
    world.probers_s = 1e6
    world.until_step(25)
    world.test_nodes()
    world.run(lambda: world.records("tested") != [], limit_s=START_S + 5)
    assert outcome(world) == "failed"
    assert world.records("paused") == []
    goes_on(world)


def test_a_rank_that_hangs_before_the_boundary_ends_the_pause_and_is_found() -> None:
    world = World(nodes=3, script=Script(steps=5000))
    world.until_step(25)
    world.test_nodes()
    world.run(lambda: world.records("test_begun") != [])
    world.run(lambda: any(c.run.pausing for c in world.controllers()))
    world.stop_rank(3)
    world.run(lambda: world.records("recovered") != [], limit_s=120)
    assert outcome(world) == "failed"
    assert world.records("hang")[-1]["ranks"] == [3]


def test_training_that_ends_meanwhile_is_complete() -> None:
    world = World(nodes=2, script=Script(steps=47))
    world.until_step(25)
    world.test_nodes()
    assert world.until_over()["verdict"] == "completed"


@pytest.mark.parametrize(
    "options", [{"script": Script(attached=False)}, {"mode": Mode.OBSERVE}, {"mode": Mode.CHECKPOINT}], ids=str
)
def test_where_ranks_cannot_pause_it_says_so(options: dict[str, object]) -> None:
    world = World(nodes=2, **options)  # type: ignore[arg-type]
    world.run(limit_s=10)
    world.test_nodes()
    world.run(limit_s=1)
    assert outcome(world) == "not_possible"


def test_one_test_at_a_time() -> None:
    world = World(nodes=2)
    until_paused(world)
    world.test_nodes()
    world.run(lambda: world.records("pause_ended") != [])
    assert [fields["outcome"] for fields in world.records("tested")] == ["not_possible", "fine"]
    goes_on(world)


def until_uncertain_hang(world: World, rank: int = 3) -> None:
    """A rank computes for ever, and the user's limit is over."""
    world.until_step(25)
    world.life.absent.add(rank)
    world.run(lambda: world.records("test_begun") != [], limit_s=60)
    assert world.starts[-1][1].state.round == 0  # no rank of the next round runs yet


def test_nodes_are_tested_before_ranks_restart_after_an_uncertain_hang() -> None:
    world = World(nodes=3, spares=1, hang_timeout_s=5.0)
    world.slow_nodes = {"n2"}
    until_uncertain_hang(world)
    world.run(lambda: world.records("recovered") != [])
    assert world.records("tested")[0]["replaced"] == ["n2"]
    assert world.members() == ["n1", "n4", "n3"]
    assert world.records("paused") == []
    assert world.until_over()["verdict"] == "completed"


def test_nodes_that_pass_restart_in_place_after_an_uncertain_hang() -> None:
    world = World(nodes=3, hang_timeout_s=5.0)
    until_uncertain_hang(world)
    world.run(lambda: world.records("recovered") != [])
    assert world.members() == ["n1", "n2", "n3"]
    assert outcome(world) == "fine"


@pytest.mark.parametrize("what", ["never ready", "no result", "never ends"])
def test_a_test_before_a_restart_holds_it_up_only_so_long(what: str) -> None:
    world = World(nodes=3, hang_timeout_s=5.0)
    world.probers_s = 1e6 if what == "never ready" else 1.0
    world.testing_s = 1e6 if what == "never ends" else 1.0
    world.test_fails = "planted" if what == "no result" else ""
    until_uncertain_hang(world)
    world.run(lambda: world.records("recovered") != [], limit_s=100)
    assert outcome(world) == "failed"


@pytest.mark.parametrize("what", ["never ready", "never ends"])
def test_a_test_before_a_restart_leaves_time_for_the_start_itself(what: str) -> None:
    world = World(nodes=3, hang_timeout_s=5.0, start_timeout_s=12.0)
    world.probers_s = 1e6 if what == "never ready" else 1.0
    world.testing_s = 1e6
    until_uncertain_hang(world)
    world.run(lambda: world.records("recovered") != [], limit_s=20)
    assert outcome(world) == "failed"
    assert world.records("slow_start") == []


@pytest.mark.parametrize("fault", ["node", "controller", "stop"])
def test_what_fails_during_a_test_before_a_restart(fault: str) -> None:
    world = World(nodes=3, spares=1, hang_timeout_s=5.0)
    until_uncertain_hang(world)
    if fault == "node":
        world.power_off("n3")
    elif fault == "controller":
        world.kill_agent("n1")
        world.start_agent("n1")
    else:
        world.warn("TERM")
        assert world.until_over()["verdict"] == "terminated"
        return
    assert world.until_over()["verdict"] == "completed"


def test_a_certain_hang_and_a_first_failure_of_a_rank_wait_for_no_test() -> None:
    world = World(nodes=3)
    world.until_step(25)
    world.stop_rank(3)
    world.until_round(1)
    world.fail_rank(1)
    world.until_round(2)
    assert world.records("test_begun") == []


def test_a_node_on_which_ranks_die_again_before_a_commit_is_tested() -> None:
    world = World(nodes=3, spares=1, script=Script(save_every=100000, steps=200))
    world.slow_nodes = {"n2"}
    world.until_step(15)
    world.fail_rank(2)
    world.until_round(1)
    assert world.records("test_begun") == []
    world.run(limit_s=2.0)
    world.fail_rank(3)
    world.until_round(2)
    assert "n2" in world.records("test_begun")[0]["reason"]
    assert "n2" not in world.members()
    assert world.until_over()["verdict"] == "completed"


def test_a_spare_is_tested_before_it_replaces_a_node_where_the_user_wants_nodes_checked() -> None:
    world = World(nodes=3, spares=2, test_replacements=True)
    world.slow_nodes = {"n4"}
    world.until_step(25)
    world.power_off("n3")
    world.until_round(1)
    assert world.members() == ["n1", "n2", "n5"]
    assert [fields["replaced"] for fields in world.records("tested")] == [["n4"], []]
