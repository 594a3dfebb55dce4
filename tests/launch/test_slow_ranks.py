"""Ranks that train more slowly, in a virtual cluster: what is reported, and what follows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resilio_hpc.diagnose.slow.rank_facts import WINDOW_S, NodeFacts, RankWindow
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.rank_layout import role_of
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

OWN = RankWindow(3000, 2000, 200, 50)
BUSY = RankWindow(4900, 100, 110, 28, throttled=3500)
WAITING = RankWindow(1700, 3300, 110, 28)


def options(rows: tuple[str, ...]) -> LaunchOptions:
    return LaunchOptions("train.py", "script", "run", layouts=rows)


def pass_windows(world: World, count: int, slow: tuple[int, ...] = (), facts: RankWindow = BUSY, **node: Any) -> None:
    """Let agents report windows, in which some ranks are slow."""
    for _ in range(count):
        window = int(world.unix() // WINDOW_S)
        for agent in list(world.agents.values()):
            local = agent.core.ranks.local
            if local is None:
                continue
            ranks = [rank.rank for rank in local.ranks.values()]
            seen = tuple((facts if rank in slow else WAITING if slow else OWN) for rank in ranks)
            known = NodeFacts(sent=1000, trip=300)
            if agent.node in node:
                known = msgspec.structs.replace(known, **node[agent.node])
            agent.core.ranks.times.passed(local.number, window, seen, known)
        world.run(limit_s=WINDOW_S)


def running(**options: Any) -> World:
    world = World(nodes=2, script=Script(steps=100_000), **options)
    world.until_step(15)
    pass_windows(world, 10)
    return world


def test_a_slow_rank_is_told_with_node_and_cause_and_told_when_it_is_over() -> None:
    world = running()
    assert world.records("slow") == []
    pass_windows(world, 8, slow=(3,))
    (told,) = world.records("slow")
    assert (told["ranks"], told["nodes"], told["cause"], told["certain"], told["acted"]) == (
        [3], ["n2"], "cpu_throttled", True, False,
    )  # fmt: skip
    assert "rank 3 on n2 is" in words("slow", told)
    assert "processor quota" in words("slow", told)
    pass_windows(world, 10)
    (over,) = world.records("slow_over")
    assert over["ranks"] == [3]
    assert over["lasted_s"] > 0
    assert "as fast as before" in words("slow_over", over)


def test_to_act_is_to_test_the_nodes_while_ranks_pause_and_without_a_spare_the_run_goes_on() -> None:
    world = running(slow_ranks="act")
    world.slow_nodes = {"n2"}
    pass_windows(world, 8, slow=(3,))
    assert [told["acted"] for told in world.records("slow")] == [True]
    world.run(lambda: world.records("pause_ended") != [], limit_s=60)
    (tested,) = world.records("tested")
    assert (tested["slow"], tested["replaced"]) == (["n2"], [])
    assert len(world.starts) == 1


def test_a_spare_takes_the_place_of_the_node_that_the_test_finds_slow_after_a_commit() -> None:
    world = running(slow_ranks="act", spares=1)
    world.slow_nodes = {"n2"}
    pass_windows(world, 8, slow=(3,))
    world.run(lambda: len(world.starts) == 2, limit_s=60)
    assert [member.node for member in world.last.state.members] == ["n1", "n3"]
    (regrouped,) = world.records("regroup")
    assert "n2" in regrouped["reason"]
    assert world.last.restore is not None
    assert world.records("recovered") == []  # no failure, and no budget is used


def test_a_slow_rank_whose_node_passes_the_test_is_kept() -> None:
    world = running(slow_ranks="act", spares=1)
    pass_windows(world, 8, slow=(3,))
    world.run(lambda: world.records("pause_ended") != [], limit_s=60)
    assert [tested["outcome"] for tested in world.records("tested")] == ["fine"]
    world.run(limit_s=20)
    assert len(world.starts) == 1


def test_what_was_told_ends_with_its_round() -> None:
    world = running()
    pass_windows(world, 8, slow=(3,))
    world.fail_rank(0)
    world.run(lambda: world.records("recovered") != [])
    pass_windows(world, 2)
    (over,) = world.records("slow_over")
    assert "restarted" in over["reason"]


def test_a_node_whose_windows_are_missing_holds_up_nothing() -> None:
    world = running()
    world.agents["n1"].core.ranks.times.passed = lambda *_: None  # type: ignore[method-assign]
    pass_windows(world, 10, slow=(3,))
    assert [told["ranks"] for told in world.records("slow")] in ([[3]], [])
    assert len(world.controller.slow._waiting) <= 2


def test_windows_of_another_number_of_ranks_and_of_no_member_are_refused() -> None:
    world = running()
    odd = m.RankTimes("n2", 1, 0, 1, (BUSY,) * 7, NodeFacts())
    world.controller.handle(odd)
    world.run(limit_s=10)
    assert world.records("slow") == []


def test_where_calls_are_not_seen_no_rank_is_blamed() -> None:
    world = running()
    pass_windows(world, 10, slow=(3,), facts=RankWindow(-1, 0, 0, 28))
    assert [told["ranks"] for told in world.records("slow") if told["ranks"]] == []


def hold_down_gpus(world: World, node: str) -> None:
    """Two of the node's GPUs are too hot, as its newest sample of metrics says."""
    world.agents[node].core.ranks.times.gpus(2, 0x40)


def test_where_calls_are_not_seen_the_node_whose_gpus_are_too_hot_is_named() -> None:
    world = running()
    hold_down_gpus(world, "n2")
    pass_windows(world, 10, slow=(3,), facts=RankWindow(-1, 0, 0, 28))
    (told,) = world.records("slow")
    assert (told["nodes"], told["ranks"], told["cause"]) == (["n2"], [2, 3], "gpu_throttled")
    assert "2 of the GPUs of n2 are throttled by heat" in words("slow", told)


@pytest.mark.parametrize(("hot", "cause"), [("n2", "gpu_throttled"), ("n1", "unknown")])
def test_a_slow_rank_without_another_cause_is_slow_by_its_own_nodes_gpus(hot: str, cause: str) -> None:
    world = running()
    hold_down_gpus(world, hot)
    pass_windows(world, 8, slow=(3,), facts=msgspec.structs.replace(BUSY, throttled=0))
    (told,) = world.records("slow")
    assert (told["ranks"], told["cause"]) == ([3], cause)


@pytest.mark.parametrize(
    ("rows", "rank", "role"), [((), 5, 0), (("tp=2,pp=2",), 5, 3), (("tp=2,pp=2",), 1, 1), (("tp=3",), 1, 0)]
)
def test_a_rank_has_the_role_of_its_place_in_a_copy_of_the_model(rows: tuple[str, ...], rank: int, role: int) -> None:
    assert role_of(options(rows), "", rank, 8) == role
