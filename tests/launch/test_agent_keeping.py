"""Agents are kept running: real processes, an srun of our own making that does what a test tells it, and no Slurm."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from resilio_hpc.launch.allocation.placements import Recipe, Site, SiteMode, placements, srun_argv
from resilio_hpc.launch.allocation.restart_policy import QUIET_RETRY_S, VERDICT_WAIT_S
from resilio_hpc.launch.config.agent_settings import AGENT_LIVES, AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.slurm.client.allocation import Allocation
from tests.support.launch.keeper_bench import Bench, bench

__all__ = ["bench"]


def test_a_dead_srun_is_started_again_and_the_others_are_not_touched(bench: Callable[..., Bench]) -> None:
    b = bench(3)
    b.until(lambda: sorted(b.started()) == ["n1", "n2", "n3"])
    before = {node: b.of(node).process for node in ("n1", "n3")}
    b.kill("n2")
    b.until(lambda: len(b.started()) == 4)
    assert b.started()[-1] == "n2"
    assert {node: b.of(node).process for node in ("n1", "n3")} == before
    assert b.watch.asked == 1  # whether the node is still ours; nobody waited for the answer
    assert b.kinds() == ["agent_ended n2"]


def test_starts_come_one_after_the_other_when_there_are_many(bench: Callable[..., Bench]) -> None:
    b = bench(24)
    b.tick()
    running = [b.keeper.running]
    while running[-1] < 24:
        b.tick(0.075)
        running.append(b.keeper.running)
    assert running[:4] == [16, 17, 19, 20]


def test_launches_that_fail_while_slurm_is_away_are_tried_until_it_is_back(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    b.until(lambda: len(b.started()) == 2)
    b.ending(1)
    b.watch.answering = False
    b.kill("n2")
    away = b.now + 60.0
    b.until(lambda: b.now > away, seconds=0.5)
    assert len(b.started()) > 8
    assert not b.of("n2").attempts.given_up
    b.ending(None)
    b.watch.answering = True
    b.until(lambda: b.keeper.running == 2, seconds=0.5)
    assert "launch_failed n2" in b.kinds()
    assert not b.keeper.hopeless


def test_agents_that_can_be_started_nowhere_are_hopeless_and_those_of_one_node_are_not(
    bench: Callable[..., Bench],
) -> None:
    b = bench(2)
    b.ending(1)
    b.until(lambda: b.keeper.hopeless, seconds=0.1)
    assert len(b.started()) >= 12
    assert b.now < 1030.0
    b.watch.answering = False
    assert not b.keeper.hopeless  # it may be Slurm


def test_a_node_that_left_the_job_is_not_started_again_and_its_srun_not_waited_for(
    bench: Callable[..., Bench],
) -> None:
    b = bench(3)
    b.until(lambda: len(b.started()) == 3)
    b.watch.says("n1", "n3")
    assert b.tick()
    assert b.keeper.running == 2
    assert "node_left_job n2" in b.kinds()
    b.tick(100.0)
    assert len(b.started()) == 3


def test_nothing_is_started_after_the_verdict(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    b.until(lambda: len(b.started()) == 2)
    b.files.verdict = {"verdict": "completed"}
    for node in ("n1", "n2"):
        b.kill(node)
    b.until(lambda: not b.tick())
    assert len(b.started()) == 2


@pytest.mark.parametrize("hangs", [False, True])
def test_an_agent_that_was_killed_is_started_again_though_the_run_directory_hangs(
    bench: Callable[..., Bench], hangs: bool
) -> None:
    b = bench(2)
    b.until(lambda: len(b.started()) == 2)
    b.files.hangs = hangs
    b.kill("n2")
    b.until(lambda: len(b.started()) == 3)
    assert b.now < 1010.0


def test_after_an_end_in_order_the_verdict_is_waited_for(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    b.until(lambda: len(b.started()) == 2)
    b.ending(0)
    b.kill("n1")  # by then they end well
    b.kill("n2")
    b.until(lambda: b.kinds().count("agent_ended n1") == 2 and b.kinds().count("agent_ended n2") == 2)
    before = len(b.started())
    ended = b.now
    b.files.hangs = True
    b.tick(VERDICT_WAIT_S + 10.0)
    b.tick(600.0)  # it hangs, and nobody can know
    assert len(b.started()) == before
    b.files.hangs = False
    b.ending(None)
    b.until(lambda: len(b.started()) == before + 2)
    assert b.now > ended + 600.0


def test_a_lost_node_whose_srun_ends_with_0_is_tried_again_while_the_others_go_on(
    bench: Callable[..., Bench],
) -> None:
    b = bench(2)
    b.until(lambda: len(b.started()) == 2)
    b.ending(0)
    b.kill("n2")
    b.until(lambda: b.kinds().count("agent_ended n2") == 2)
    ended = b.now
    b.ending(None)
    b.until(lambda: b.keeper.running == 2, seconds=0.5)
    assert QUIET_RETRY_S <= b.now - ended < VERDICT_WAIT_S


def test_where_another_agent_lives_it_is_tried_slowly_and_for_ever(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    b.ending(AGENT_LIVES)
    b.until(lambda: b.now > 1300.0, seconds=1.0)
    assert 5 <= len(b.started()) <= 10
    assert not b.of("n1").attempts.given_up


def test_an_agent_of_a_joiner_that_ends_well_has_left_and_any_other_is_started_again(
    bench: Callable[..., Bench],
) -> None:
    b = bench(2, leaves=True)
    b.until(lambda: len(b.started()) == 2)
    b.ending(0)
    for node in ("n1", "n2"):
        b.kill(node)
    b.until(lambda: not b.tick())
    assert b.keeper.left_in_order
    assert len(b.started()) == 4


def test_a_group_shares_an_srun_and_is_restarted_as_a_group(bench: Callable[..., Bench]) -> None:
    b = bench(4, group=2)
    b.until(lambda: sorted(b.started()) == ["n1,n2", "n3,n4"])
    b.kill("n3")
    b.until(lambda: len(b.started()) == 3)
    assert b.started()[-1] == "n3,n4"


def test_a_group_that_cannot_be_launched_is_taken_apart(bench: Callable[..., Bench]) -> None:
    b = bench(4, group=4)
    b.ending(233)
    b.until(lambda: len(b.started()) == 2)
    assert b.started() == ["n1,n2,n3,n4"] * 2
    b.until(lambda: len(b.keeper.placements) > 1)
    b.ending(None)
    b.until(lambda: {*b.started()[2:]} == {"n1", "n2", "n3", "n4"} and b.keeper.running == 4)


def test_a_node_whose_agent_is_gone_gets_an_srun_of_its_own_and_its_group_goes_on(
    bench: Callable[..., Bench],
) -> None:
    b = bench(4, group=4)
    b.until(lambda: b.started() == ["n1,n2,n3,n4"])
    b.tick(90.0)
    everybody = ["n1", "n2", "n3", "n4"]
    b.status(1, everybody, ["n3"])
    b.tick(2.0)
    b.tick(2.0)
    assert len(b.keeper.placements) == 1  # nobody leads: the file is an old one
    b.status(2, everybody, ["n3"])
    b.tick(2.0)
    b.until(lambda: b.started() == ["n1,n2,n3,n4", "n3"])
    assert b.of("n1").nodes == ("n1", "n2", "n4")
    assert "own_srun n3" in b.kinds()
    b.kill("n1")
    b.until(lambda: b.started()[2:] == ["n1,n2,n4"])


def test_a_moved_end_of_the_job_reaches_the_run_directory(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    b.watch.says("n1")
    b.tick()
    assert b.files.ends == []
    b.watch.says("n1", end_time=5000.0)
    b.tick()
    assert b.files.ends == [("7", 5000.0)]
    assert [kind for kind in b.kinds() if kind.startswith("end_time")] == ["end_time "]
    b.watch.says("n1")  # not told: as it was
    b.tick()
    b.watch.says("n1", end_time=math.inf)
    b.tick()
    assert b.files.ends == [("7", 5000.0), ("7", None)]


def test_an_end_that_slurm_does_not_tell_is_said_once(
    bench: Callable[..., Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    b = bench(1)
    for _ in range(2):
        b.watch.says("n1")
        b.tick()
    assert b.files.ends == []
    assert capfd.readouterr().err.count("does not tell when job 7 ends") == 1


def test_what_a_group_is_told() -> None:
    nodes = tuple(f"n{number}" for number in range(40))
    allocation = Allocation("7", nodes, "n0", False, cpus_per_node=(8,) * 40)
    options = LaunchOptions(script="train.py", kind="script", run_dir="/run")
    recipe = Recipe(AgentSettings(options, "", "7", nodes, ""), allocation, by_srun=True, binds=True)
    argv = recipe.argv(("n3", "n4"))
    settings = AgentSettings.from_json(argv[-1])
    assert settings.node == ""
    assert settings.on_this_node({"SLURMD_NODENAME": "n4"}).address == "n4"
    assert AgentSettings.from_json(recipe.argv(("n3",))[-1]).node == "n3"
    flags = set(srun_argv(("n3", "n4"), allocation, binds=True))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n3,n4", "--cpus-per-task=8"} <= flags
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--cpu-bind=none"} <= flags


def test_up_to_32_nodes_have_an_srun_each_and_more_share_them() -> None:
    options = LaunchOptions(script="train.py", kind="script", run_dir="/run")
    for count, groups in ((32, 32), (33, 3), (1024, 64)):
        nodes = tuple(f"n{number}" for number in range(count))
        recipe = Recipe(AgentSettings(options, "", "7", nodes, ""), Allocation("7", nodes, "n0", False), by_srun=True)
        assert len(placements(Site(SiteMode.BATCH, "7", nodes, True), recipe, {})) == groups
