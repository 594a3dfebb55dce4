"""What an agent does by itself, whoever leads."""

from __future__ import annotations

import pytest

from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.decisions.heartbeat import beat_interval_s
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


@pytest.mark.parametrize(
    ("timeout_s", "agents", "interval_s"),
    [(5.0, 2, 0.625), (5.0, 1000, 0.625), (5.0, 3200, 0.8), (5.0, 4000, 1.0), (5.0, 10_000, 1.0), (2.0, 4000, 0.4),
     (60.0, 4, 1.0)],
)  # fmt: skip
def test_thousands_of_agents_beat_less_often_but_five_times_in_a_timeout(
    timeout_s: float, agents: int, interval_s: float
) -> None:
    assert beat_interval_s(timeout_s, agents) == interval_s


def test_a_rank_whose_snapshots_have_less_room_is_in_the_ledger() -> None:
    world = World(nodes=2)
    world.until_step(5)
    agent = world.agents["n2"]
    local = agent.core.ranks.local
    assert local is not None
    agent.core.ranks.rank_said(local.number, 1, rank_link.SnapshotPlaced(7, SnapshotRoom.ONE, "no room on /tmp"))
    agent.core.ranks.rank_said(local.number - 1, 1, rank_link.SnapshotPlaced(8, SnapshotRoom.NONE, "of another round"))
    (told,) = world.records("snapshot_room")
    assert words("snapshot_room", told) == (
        "step 7: saves of rank 3 on n2 have room for one snapshot alone: each is written over the one before "
        "(no room on /tmp)"
    )


def test_a_rank_that_saves_again_what_its_round_began_with_is_told_that_it_is_committed() -> None:
    world = World(nodes=2, script=Script(steps=1000))
    world.until_step(12)
    world.run(lambda: bool(world.records("committed")))  # step 10
    world.fail_rank(1)
    world.until_round(1)
    world.run(lambda: world.step > 10)
    told: list[object] = []
    agent = world.agents["n1"]
    agent.tell_rank = lambda _rank, message: told.append(message)  # type: ignore[method-assign]
    local = agent.core.ranks.local
    assert local is not None and local.restore == m.RestorePoint(Tier.MEMORY, 10)
    for step in (10, 30):  # of the later one others tell, when it is
        agent.core.ranks.rank_said(local.number, 0, rank_link.SnapshotTaken(step, "arena", 1, 0.0))
    assert told == [rank_link.SaveProgress(10, Stage.COMMITTED)]
