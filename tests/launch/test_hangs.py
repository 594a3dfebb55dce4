"""Ranks that live and do not go on, in a virtual cluster: what is reported, blamed and restarted, and when."""

from __future__ import annotations

import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.faults.hangs import ANSWER_S, FIRST_LOOK_S, UNCERTAIN_S
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.watch.learned_limit import LEAST_S
from resilio_hpc.watch.limit_table import FIRST_LIMIT_S
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def test_a_stopped_rank_is_blamed_and_restarted_as_soon_as_the_limit_is_over() -> None:
    world = World(nodes=3)
    world.until_step(25)
    began = world.now
    world.stop_rank(3)
    world.run(lambda: world.records("recovered") != [])
    (stalled,) = world.records("stalled")
    (hang,) = world.records("hang")
    assert (hang["kind"], hang["ranks"], hang["nodes"], hang["certain"], hang["acted"]) == (
        "absent", [3], ["n2"], True, True,
    )  # fmt: skip
    assert "stopped" in hang["evidence"]
    assert "did not enter all_reduce" in hang["evidence"]
    (told,) = world.records("recovered")
    assert (told["kind"], told["node"], told["rank"]) == ("hang", "n2", 3)
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 20)
    assert world.times("hang")[0] - world.times("stalled")[0] < 0.3
    assert stalled["limit_s"] == LEAST_S
    assert world.now - began < LEAST_S + 2.0


def test_a_rank_that_only_computes_is_waited_for() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.life.absent.add(1)  # it runs, and does not enter the call
    world.run(lambda: world.records("recovered") != [], limit_s=900)
    first, last = world.records("hang")[0], world.records("hang")[-1]
    assert (first["ranks"], first["certain"], first["acted"]) == ([1], False, False)
    assert first["waits_until_s"] == UNCERTAIN_S
    assert last["acted"]
    assert last["silent_s"] >= UNCERTAIN_S


def test_ranks_that_torch_lets_wait_for_longer_are_not_restarted_before() -> None:
    """One rank prepares data for 50 minutes, and the others wait for it in a barrier whose limit is an hour."""
    world = World(nodes=2)
    world.until_step(25)
    world.life.may_wait_s = 3600.0
    world.life.absent.add(1)
    world.run(limit_s=3000)
    assert [fields["acted"] for fields in world.records("hang")] == [False]
    assert world.records("hang")[0]["waits_until_s"] == 3600.0
    world.run(lambda: world.records("recovered") != [], limit_s=700)
    assert world.records("hang")[-1]["silent_s"] >= 3600.0


def test_where_the_ranks_are_is_told_with_the_rank_to_blame_first() -> None:
    world = World(nodes=3, hang_timeout_s=5.0)
    world.until_step(25)
    world.life.absent.add(3)
    world.run(lambda: world.records("recovered") != [])
    hang = world.records("hang")[-1]
    assert hang["places"] == [
        {"place": "data.py:12", "count": 1, "ranks": (3,)},
        {"place": "train.py:40", "count": 5, "ranks": (0, 1, 2, 4, 5)},
    ]
    assert words("hang", hang).endswith("the ranks are restarted; rank 3 at data.py:12; 5 ranks at train.py:40")


def test_a_rank_that_comes_back_is_not_restarted() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.life.absent.add(1)
    world.run(limit_s=20)
    world.life.absent.clear()
    world.until_step(60)
    assert [fields["acted"] for fields in world.records("hang")] == [False]
    assert len(world.records("goes_on")) == 1
    assert world.records("recovered") == []


@pytest.mark.parametrize(
    "options", [{"hang_timeout_s": 0.0}, {"mode": Mode.OBSERVE}, {"mode": Mode.CHECKPOINT}], ids=str
)
def test_where_hangs_are_only_told_nothing_is_restarted(options: dict[str, object]) -> None:
    world = World(nodes=2, **options)
    world.until_step(25)
    world.stop_rank(1)
    world.run(limit_s=300)
    assert world.records("hang") != []
    assert [fields["acted"] for fields in world.records("hang")] == [False] * len(world.records("hang"))
    assert len(world.records("hang")) < 4  # it is not told again and again
    assert world.records("recovered") == []
    assert len(world.starts) == 1


@pytest.mark.parametrize("steps", [25, 3], ids=["learned", "too few steps to learn from"])
def test_the_users_limit_is_kept(steps: int) -> None:
    world = World(nodes=2, hang_timeout_s=7.0)
    world.until_step(steps)
    world.life.absent.add(1)
    world.run(lambda: world.records("recovered") != [], limit_s=60)
    assert 7.0 <= world.records("hang")[-1]["silent_s"] < 7.2 + ANSWER_S


def test_ranks_that_wait_for_their_last_checkpoint_are_left_alone() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.life.say_section("last checkpoint")
    world.life.absent.add(1)
    world.run(limit_s=700)
    assert world.records("stalled") == []
    world.life.absent.clear()
    world.life.say_section("")
    world.until_step(60)
    assert world.records("recovered") == []


def test_a_rank_that_waits_for_a_file_system_is_named_and_not_restarted() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.life.absent.add(2)
    world.life.state_of_absent = "D"
    world.run(limit_s=700)
    (hang,) = world.records("hang")
    assert (hang["ranks"], hang["acted"]) == ([2], False)
    assert "waits_until_s" not in hang
    assert "sleeps in the kernel" in hang["evidence"]


def test_ranks_that_evaluate_for_minutes_and_come_back_one_by_one_are_no_hang() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.life.absent |= {0, 1, 2, 3}
    for rank in range(4):
        world.run(limit_s=400)
        world.life.absent.discard(rank)
    world.until_step(60)
    assert world.records("hang") != []
    assert not any(fields["acted"] for fields in world.records("hang"))
    assert world.records("recovered") == []


def test_two_ranks_stopped_one_during_the_look_at_the_other() -> None:
    world = World(nodes=3)
    world.until_step(25)
    world.stop_rank(0)
    world.run(lambda: world.records("stalled") != [])
    world.stop_rank(4)
    world.run(lambda: world.records("recovered") != [])
    world.until_round(1)
    assert world.members() == ["n1", "n2", "n3"]


def test_a_controller_that_dies_during_a_hang_leaves_it_to_the_next_one() -> None:
    world = World(nodes=3)
    world.until_step(25)
    world.stop_rank(5)
    world.run(lambda: world.records("stalled") != [])
    world.kill_agent("n1")
    world.start_agent("n1")
    world.run(lambda: world.records("recovered") != [], limit_s=100)
    world.until_step(40)


def test_a_rank_stopped_before_the_limit_is_known_is_found_long_before_it() -> None:
    world = World(nodes=2, script=Script(steps=200))
    world.until_step(2)
    began = world.now
    world.stop_rank(1)
    world.run(lambda: world.records("recovered") != [], limit_s=100)
    assert world.records("hang")[-1]["ranks"] == [1]
    (stalled,) = world.records("stalled")
    assert (stalled["limit_s"], stalled["silent_s"] < 1.5 * FIRST_LOOK_S) == (FIRST_LIMIT_S, True)
    assert world.now - began < 1.5 * FIRST_LOOK_S + 2.0


def test_a_rank_that_computes_is_not_taken_for_hung_before_the_limit_is_known() -> None:
    world = World(nodes=2, script=Script(steps=200))
    world.until_step(2)
    world.life.absent.add(1)
    world.run(limit_s=0.95 * FIRST_LIMIT_S)
    world.life.absent.clear()
    world.until_step(60)
    assert (world.records("stalled"), world.records("hang"), world.records("recovered")) == ([], [], [])


def test_a_rank_that_is_continued_between_two_early_looks_is_left_alone() -> None:
    world = World(nodes=2, script=Script(steps=200))
    world.until_step(2)
    world.stop_rank(1)
    looks = 0
    while not looks:
        world.run(limit_s=0.05)
        looks = sum(isinstance(message, m.LookAtRanks) for message in world.agents["n1"].heard)
    world.run(limit_s=0.05)  # it is answered
    world.life.stopped.clear()
    world.until_step(60)
    assert (world.records("stalled"), world.records("hang"), world.records("recovered")) == ([], [], [])


def test_a_job_that_slurm_suspends_and_resumes_has_no_hang() -> None:
    world = World(nodes=3, heartbeat_timeout_s=60.0)
    world.until_step(25)
    for node, site in world.sites.items():
        site.frozen = True
        world.agents[node].suspend()
    world.run(limit_s=30)
    world.life.stopped.add(4)  # the ranks of another node are continued last
    for node in world.sites:
        world.agents[node].resume()
    world.run(limit_s=1)
    world.life.stopped.clear()
    for site in world.sites.values():
        site.frozen = False
    world.until_step(40)
    assert world.records("hang") == []
    assert world.records("recovered") == []
