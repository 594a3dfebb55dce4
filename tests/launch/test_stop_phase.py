"""How a job's part of a run ends before training does."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.controller.members.stopping import MARGIN_STEPS, StopAgreement
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import UNIX_0, World


def stopped_at(world: World) -> int:
    (agreed,) = world.records("stop_agreed")
    return int(agreed["step"])


@pytest.mark.parametrize(("signal", "verdict", "code"), [("TERM", "terminated", 143), ("INT", "interrupted", 130)])
def test_told_to_end_all_ranks_save_at_one_step_and_leave(signal: str, verdict: str, code: int) -> None:
    world = World(nodes=3)
    world.until_step(13)
    world.warn(signal)
    ended = world.until_over(20.0)
    assert (ended["verdict"], ended["exit_code"]) == (verdict, code)
    assert max(world.directory.committed) == stopped_at(world) == ended["committed"]
    assert len(world.starts) == 1
    assert world.records("rank_failed") == []


def test_a_warning_with_a_known_end_is_taken_up_as_late_as_saving_allows() -> None:
    world = World(nodes=2, end_time=UNIX_0 + 1060.0, save_margin_s=5.0)
    world.save_s = 2.0
    world.until_step(13)
    world.warn("USR2")
    ended = world.until_over()
    assert (ended["verdict"], ended["exit_code"]) == ("time_limit", 75)
    (begun,) = world.times("stopping")
    assert 1060.0 - 5.0 - 2 * 4.0 - 1.0 < begun < 1060.0 - 5.0 - 2 * 2.0
    assert world.now < 1060.0


def test_a_warning_without_a_known_end_is_taken_up_at_once() -> None:
    world = World(nodes=2)
    world.until_step(13)
    warned_at = world.now
    world.warn("USR2")
    assert world.until_over()["verdict"] == "time_limit"
    assert world.times("stopping")[0] - warned_at < 0.1


def test_the_end_is_seen_without_any_warning() -> None:
    world = World(nodes=2, end_time=UNIX_0 + 1030.0)
    assert world.until_over()["verdict"] == "time_limit"
    assert world.now < 1030.0


def test_a_termination_hastens_a_stop_that_was_to_begin_later() -> None:
    world = World(nodes=2, end_time=UNIX_0 + 1600.0)
    world.until_step(13)
    world.warn("USR2")
    world.run(limit_s=2.0)
    assert world.records("stopping") == []
    world.warn("TERM")
    assert world.until_over(10.0)["verdict"] == "terminated"


def test_training_that_completes_while_it_is_being_stopped_is_complete() -> None:
    world = World(nodes=2, script=Script(steps=14))
    world.until_step(13)
    world.warn("TERM")
    assert world.until_over()["verdict"] == "completed"


def test_a_plain_script_gets_a_sigterm() -> None:
    world = World(nodes=2, script=Script(attached=False, steps=10_000))
    world.run(lambda: world.records("ranks_started") != [])
    world.run(limit_s=1.0)
    world.warn("TERM")
    ended = world.until_over(5.0)
    assert ended["verdict"] == "terminated"
    assert world.records("rank_failed") == []


def test_ranks_that_do_not_answer_are_ended_when_the_grace_is_over() -> None:
    world = World(nodes=2, stop_grace_s=8.0, script=Script(ignores_stop=True))
    world.until_step(13)
    warned_at = world.now
    world.warn("TERM")
    assert world.until_over()["verdict"] == "terminated"
    assert world.records("stop_overdue") != []
    assert 8.0 <= world.now - warned_at < 9.5


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
@pytest.mark.parametrize(("signal", "end_time"), [("TERM", None), ("USR2", UNIX_0 + 1060.0)])
def test_a_clock_that_is_set_meanwhile_neither_lengthens_nor_ends_the_grace(
    jump_s: float, signal: str, end_time: float | None
) -> None:
    world = World(nodes=2, end_time=end_time, save_margin_s=20.0, stop_grace_s=8.0, script=Script(ignores_stop=True))
    world.until_step(13)
    world.warn(signal)
    world.run(lambda: world.records("stopping") != [])
    began = world.now
    for site in world.sites.values():
        site.unix_offset_s += jump_s
    world.until_over(60.0)
    assert world.records("stop_overdue") != []
    allowed = max(8.0, (end_time or 0.0) - UNIX_0 - began)
    assert began + allowed <= world.now < began + allowed + 1.5


def test_a_last_save_that_fails_ends_the_job_with_the_one_before() -> None:
    world = World(nodes=2)
    world.until_step(13)
    world.warn("TERM")
    world.run(lambda: world.records("stop_agreed") != [])
    world.saver_fails = {("n2", stopped_at(world))}
    ended = world.until_over(5.0)
    assert (ended["verdict"], ended["committed"]) == ("terminated", 10)
    assert len(world.starts) == 1


def test_a_stop_before_anybody_trains_ends_at_once() -> None:
    world = World(nodes=3, absent=("n3",))
    world.run(limit_s=1.0)
    world.warn("TERM")
    assert world.until_over(2.0)["verdict"] == "terminated"


def test_a_stop_while_ranks_start_ends_them() -> None:
    world = World(nodes=2)
    world.run(lambda: world.records("ranks_started") != [])
    world.warn("TERM")
    assert world.until_over(5.0)["verdict"] == "terminated"


def test_a_rank_that_attaches_late_hears_of_the_stop() -> None:
    world = World(nodes=2, script=Script(start_s=0.3))
    world.until_step(12)
    world.fail_rank(1)
    world.run(lambda: len(world.starts) == 2)
    world.run(limit_s=0.05)
    agent = world.agents["n1"].core.ranks
    assert agent.local is not None
    agent.local.target = 40
    agent.local.stop_confirmed = True
    world.run(lambda: world.life.target == 40 and world.life.confirmed == {"n1"})


def test_a_failure_while_stopping_ends_the_run_instead_of_starting_again() -> None:
    world = World(nodes=2, script=Script(ignores_stop=True))
    world.until_step(13)
    world.warn("TERM")
    world.run(limit_s=0.5)
    world.fail_rank(1)
    assert world.until_over(3.0)["verdict"] == "terminated"
    assert len(world.starts) == 1


def test_a_new_controller_hears_of_the_stop_from_the_agents() -> None:
    world = World(nodes=3, script=Script(ignores_stop=True))
    world.until_step(13)
    world.warn("TERM")
    world.run(limit_s=0.5)
    world.kill_agent("n1")
    world.run(lambda: set(world.agents) == set(), limit_s=20.0)
    assert world.directory.verdict is not None
    assert world.directory.verdict["verdict"] == "terminated"


def test_a_broken_connection_does_not_lose_the_stop() -> None:
    for offset in (0.0, *(0.05 + 0.001 * n for n in range(8)), 0.2):
        world = World(nodes=3)
        world.until_step(13)
        world.run(lambda world=world: round((world.now % 0.05) * 1000) in (0, 50))  # type: ignore[misc]
        world.warn("TERM")
        world.run(limit_s=offset)
        world.cut("n3")
        world.run(limit_s=0.12)
        world.cut("n3", False)
        world.break_connection("n3")
        world.until_over(10.0)
        assert max(world.directory.committed) == stopped_at(world), offset


# -- the agreement itself ----------------------------------------------------------------------------------------


def test_a_target_is_confirmed_when_every_node_accepted_it() -> None:
    agreement = StopAgreement()
    target = agreement.propose(["a", "b"], 10)
    assert target == 10 + MARGIN_STEPS
    assert agreement.answer("a", target, True, 11, 4) == ""
    assert agreement.answer("a", target, True, 11, 4) == ""
    assert agreement.answer("stranger", target, True, 11, 4) == ""
    assert agreement.answer("b", target, True, 11, 4) == "confirm"
    assert agreement.attached == 8
    assert agreement.answer("b", target, False, 99, 4) == ""


def test_a_declined_target_is_followed_by_a_later_one_for_all() -> None:
    agreement = StopAgreement()
    first = agreement.propose(["a", "b"], 10)
    assert agreement.answer("a", first, True, 11, 2) == ""
    assert agreement.answer("b", first, False, 15, 2) == "repropose"
    assert agreement.target == 15 + MARGIN_STEPS
    assert agreement.answer("a", first, True, 11, 2) == ""
    assert agreement.answer("a", agreement.target, True, 15, 2) == ""
    assert agreement.answer("b", agreement.target, True, 15, 2) == "confirm"


def test_where_no_rank_knows_of_steps_the_answer_is_plain() -> None:
    agreement = StopAgreement()
    target = agreement.propose(["a"], -1)
    assert agreement.answer("a", target, True, -1, 0) == "plain"
