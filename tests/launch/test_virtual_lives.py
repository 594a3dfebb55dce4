"""Ranks that live on, and saves of the last finished step, with the real decisions in a virtual cluster."""

from __future__ import annotations

import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.kept_ranks import ENTER_S
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.rank_process import Behaviour
from tests.support.virtual_cluster.ranks import Script, Training, life_of
from tests.support.virtual_cluster.world import World


def world_of(holds: str = "", reenters: bool = False, nodes: int = 2) -> World:
    script = Script(reenters=reenters, holds=holds)  # type: ignore[arg-type]
    world = World(nodes=nodes, script=script)
    world.until_step(17)
    return world


def next_round(world: World) -> int:
    """The steps that are made again in the next round; it makes its first one."""
    number, step = world.last.state.round, world.step
    world.until_round(number + 1)
    restore = world.last.restore
    assert restore is not None
    return step - restore.step


def kept(world: World) -> dict[str, int]:
    return {str(fields["node"]): int(fields["kept"]) for fields in world.records("ranks_left")}


def test_a_killed_rank_costs_no_finished_step_where_others_have_the_same_tensors() -> None:
    world = world_of("shared")
    world.fail_rank(1)
    assert next_round(world) == 0
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 17)
    assert [fields["made"] for fields in world.records("last_step") if fields["node"] == "n1"] == [[1]]


def test_without_the_same_tensors_it_costs_the_steps_since_the_last_save() -> None:
    world = world_of("own")
    world.fail_rank(1)
    assert next_round(world) == 7


def test_where_all_ranks_live_each_saves_its_own() -> None:
    world = world_of("own", reenters=True)
    assert world.agents["n1"].raises(1, "ValueError: nan")
    assert next_round(world) == 0
    assert kept(world) == {"n1": 2, "n2": 2}


@pytest.mark.parametrize(
    ("ahead", "early", "restored", "made"),
    [
        ({2}, set(), 17, {"n1": [1], "n2": [2]}),  # rank 2 has its record of the step before
        ({0, 2, 3}, {1}, 18, {"n1": [1], "n2": [3]}),  # rank 1 was killed in its optimizer's step
        ({2, 3}, set(), 10, {"n1": [1], "n2": [3]}),  # the nodes differ by a step
    ],
)
def test_ranks_that_differ_by_a_step_go_on_from_one_that_all_can_have(
    ahead: set[int], early: set[int], restored: int, made: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("shared")

    def breaks_at(training: Training, agent: object, rank: object) -> None:
        training.ahead |= ahead
        training.early |= early

    monkeypatch.setattr(world, "breaks_at", breaks_at)
    world.fail_rank(1)
    next_round(world)
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, restored)
    assert {fields["node"]: fields["made"] for fields in world.records("last_step")} == made


def test_ranks_that_live_enter_the_next_round_in_their_processes_and_the_others_are_new() -> None:
    world = world_of("shared", reenters=True)
    before = {node: dict(agent.processes.pids) for node, agent in world.agents.items()}
    world.fail_rank(1)
    next_round(world)
    after = {node: agent.processes.pids for node, agent in world.agents.items()}
    assert after["n2"] == before["n2"] and after["n1"][0] == before["n1"][0] and after["n1"][1] != before["n1"][1]
    assert kept(world) == {"n1": 1, "n2": 2}


@pytest.mark.parametrize("fate", ["deaf", "hangs", "stops", "dies"])
def test_a_rank_that_does_not_leave_is_ended_and_nothing_is_kept_of_it(
    fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("shared", reenters=True)
    monkeypatch.setattr(world, "leaves", lambda: Behaviour(0.05, fate))
    world.fail_rank(1)
    next_round(world)
    assert kept(world) == {"n1": 0, "n2": 0}
    assert all(process.life == life_of(agent.core.ranks.local) for agent in world.agents.values()  # type: ignore[arg-type]
               for process in agent.processes.all.values())  # fmt: skip


@pytest.mark.parametrize("fate", ["hangs", "stops"])
def test_a_kept_rank_that_never_enters_is_started_again_soon(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("shared", reenters=True)
    monkeypatch.setattr(world, "enters", lambda: Behaviour(0.05, fate))
    world.fail_rank(1)
    failed_at = world.now
    world.run(lambda: any(fields["kind"] == "spawn" for fields in world.records("rank_failed")))
    assert world.now - failed_at < ENTER_S + 1.0
    monkeypatch.setattr(world, "enters", lambda: Behaviour(0.05))
    world.until_round(2)
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 17)


def test_a_rank_that_dies_while_it_waits_for_the_round_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("shared", reenters=True)
    monkeypatch.setattr(world, "leaves", lambda: Behaviour(0.05, "waits in vain"))
    world.fail_rank(1)
    assert next_round(world) == 0
    assert world.last.state.round >= 1


def test_where_nothing_was_saved_training_begins_in_new_processes() -> None:
    world = World(nodes=2, script=Script(reenters=True))
    world.until_step(3)
    before = {node: dict(agent.processes.pids) for node, agent in world.agents.items()}
    world.fail_rank(1)
    world.until_round(1)
    assert world.last.restore is None and sum(kept(world).values()) == 3
    for node, agent in world.agents.items():
        assert set(agent.processes.pids.values()).isdisjoint(before[node].values())
        assert set(agent.processes.all) == set(agent.processes.pids.values()), "those that were kept are ended"
