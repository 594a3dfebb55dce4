"""Which snapshots belong to which life of the ranks, seen by agents: what a Start makes them forget, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def trained(nodes: int = 3) -> World:
    """Step 10 is committed, step 20 in memory alone."""
    world = World(nodes=nodes, slots=1, script=Script(save_every=10))
    world.run(lambda: 10 in world.directory.committed)
    world.slow_savers = dict.fromkeys(world.sites, 1000.0)
    world.until_step(25)
    return world


def test_an_agent_that_calls_the_same_controller_again_goes_on_with_what_it_was_told() -> None:
    """Redirected to the one that it follows, it is told once more to start the round that it has started."""
    world = trained()
    world.fail_rank(0)
    world.run(lambda: len(world.records("ranks_started")) == 6)
    core = world.agents["n3"].core
    known = core.following
    assert known is not None
    told = [message for message in world.agents["n3"].heard if isinstance(message, m.Start)]
    core.follow(known, False)
    core.controller_said(told[-1])
    world.until_step(30)
    assert (world.last.state.round, world.last.restore) == (1, m.RestorePoint(Tier.MEMORY, 20))
    assert [record["kind"] for record in world.records("rank_failed")] == ["signal"]


def test_what_is_forgotten_is_forgotten_before_the_start_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent killed in between must not seem to have been there."""
    world = trained()
    original = VirtualAgent.keep
    held: list[tuple[int, set[int]]] = []

    def keep(self: Any, state: m.RoundState) -> None:
        held.append((state.round, {step for _, step in self.site.memory}))
        original(self, state)

    monkeypatch.setattr(VirtualAgent, "keep", keep)
    world.bad_copies.add(m.RestorePoint(Tier.MEMORY, 20))
    world.fail_rank(0)
    world.run(lambda: world.last.restore == m.RestorePoint(Tier.MEMORY, 10))
    world.until_step(15)
    assert [steps for number, steps in held if number == 2][:3] == [{10}] * 3


def test_a_round_of_the_same_number_under_another_controller_is_another_life() -> None:
    """A controller that did not hear of the last round may give its number once more."""
    world = trained()
    core = world.agents["n3"].core
    assert core.ranks.state is not None
    assert core.ranks.state.life == (1, 0)
    core.ranks.state = msgspec.structs.replace(core.ranks.state, epoch=0)
    world.fail_rank(0)
    world.until_round(1)
    assert (world.last.restore, world.last.fetches) == (m.RestorePoint(Tier.MEMORY, 10), (m.MissingSnapshot(2, ""),))
    assert world.last.follows == (1, 0)
    assert {step for _, step in world.sites["n3"].memory} == set()
