"""In a virtual cluster: what follows from replicas that differ, also when they differ again after going back."""

from __future__ import annotations

import struct

import pytest

from resilio_hpc.core.judgement import Judgement
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

PARTS = 4
LONG = Script(steps=1_000_000, step_s=1.0, save_every=10)


def hear(world: World, message: m.ToController) -> None:
    """The controller gets a message as its agents send it."""
    (agent,) = [agent for agent in world.agents.values() if agent.controller is not None]
    controller = world.controller
    agent.event(lambda: agent.host._let(controller, lambda: controller.handle(message)))


def sweep(world: World, step: int, *odd: int) -> None:
    """All nodes report the sweep that ended with ``step``; the ranks ``odd`` differ."""
    run = world.controller.run
    for member in run.members:
        alike: dict[bytes, list[int]] = {}
        for rank in member.ranks:
            value = rank + 100 if rank in odd else 3
            alike.setdefault(struct.pack(f"<{PARTS}Q", 1, 2, value, 4), []).append(rank)
        found = tuple(
            m.EqualReplicas("g", run.world_size, 5, data, tuple(ranks), ("a", "b", "c", "d"))
            for data, ranks in alike.items()
        )
        hear(world, m.ReplicasDigested(member.node, run.epoch, run.round, step, 0, PARTS, found))


def trained(steps: int, **config: object) -> World:
    world = World(nodes=3, slots=1, script=LONG, **config)  # type: ignore[arg-type]
    world.until_step(steps)
    world.run(limit_s=3)
    return world


def test_a_difference_is_reported_once_and_nothing_follows() -> None:
    world = trained(25)
    for step in (20, 24, 25):
        sweep(world, step, 1)
    (found,) = world.records("digests_differ")
    assert (found["ranks"], found["nodes"], found["tensor"]) == ([1], ["n2"], "c")
    assert (found["step"], found["verified"], found["policy"]) == (19, -1, "report")
    sweep(world, 26)
    sweep(world, 27, 1)
    assert len(world.records("digests_differ")) == 2  # they were equal in between
    assert world.records("decision") == []


def test_a_step_is_verified_by_a_sweep_that_began_after_it() -> None:
    world = trained(25)
    assert world.controller.run.committed_steps == {10, 20}
    sweep(world, 12)  # over the boundaries 9 … 12
    assert world.records("step_verified") == []
    sweep(world, 13)
    sweep(world, 16)
    assert [event["step"] for event in world.records("step_verified")] == [10]


def test_a_commit_names_the_verified_step_that_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, int]] = []
    commit = VirtualAgent.commit

    def seen(agent: VirtualAgent, message: m.CommitStep) -> None:
        kept.append((message.step, message.verified))
        commit(agent, message)

    monkeypatch.setattr(VirtualAgent, "commit", seen)
    world = trained(25)
    sweep(world, 16)
    world.until_step(35)
    world.run(lambda: 30 in world.controller.run.committed_steps, limit_s=10)
    assert dict(kept) == {10: -1, 20: -1, 30: 10}


def test_all_go_back_to_the_newest_verified_step_and_to_no_newer_snapshot() -> None:
    world = trained(35, on_corruption="restore")
    sweep(world, 23)
    assert world.controller.run.verified_steps == {10, 20}
    world.bad_copies.add(m.RestorePoint(Tier.COMMITTED, 30))  # the invariants know of it, too
    sweep(world, 34, 2)
    world.until_round(1)
    start = world.last
    assert (start.restore, start.cause and start.cause.node) == (m.RestorePoint(start.restore.source, 20), "n3")
    world.until_step(22)
    assert world.controller.run.not_after is None
    assert "n3" in world.controller.run.suspects
    assert 30 not in world.controller.run.committed_steps
    (failed,) = world.records("rank_failed")
    assert (failed["kind"], failed["rank"], failed["class"]) == ("corruption", 2, "gpu_hardware")
    world.until_step(31)
    world.run(lambda: 30 in world.controller.run.committed_steps, limit_s=10)  # of the new life


def test_where_they_differ_again_before_anything_is_verified_the_next_older_step_is_tried_and_at_last_none() -> None:
    world = trained(35, on_corruption="restore")
    sweep(world, 23)
    for step in (20, 30):
        world.bad_copies.add(m.RestorePoint(Tier.COMMITTED, step))
    for number, restored in enumerate((20, 10), 1):
        world.bad_copies.discard(m.RestorePoint(Tier.COMMITTED, restored))
        sweep(world, 34, 2)
        world.until_round(number)
        assert world.last.restore.step == restored
        world.until_step(restored + 5)
        world.bad_copies.add(m.RestorePoint(Tier.COMMITTED, restored))
    sweep(world, 34, 2)
    assert world.until_over()["verdict"] == "failed"


def test_a_spare_takes_the_place_of_the_node_to_blame() -> None:
    world = World(nodes=3, spares=1, slots=1, script=LONG, on_corruption="restore")
    world.until_step(25)
    world.run(limit_s=3)
    sweep(world, 23)
    sweep(world, 27, 0)
    world.until_round(1)
    assert set(world.members()) == {"n2", "n3", "n4"}
    assert world.last.restore.step == 20


def test_two_that_differ_go_back_and_both_nodes_are_in_doubt() -> None:
    world = World(nodes=2, slots=1, script=LONG, on_corruption="restore")
    world.until_step(25)
    world.run(limit_s=3)
    sweep(world, 23)
    sweep(world, 27, 1)
    assert world.controller.run.in_doubt == {"n1", "n2"}
    assert world.controller.run.suspects == set()
    world.until_round(1)
    assert world.last.restore.step == 20


@pytest.mark.parametrize("verified", [True, False])
def test_a_run_that_shall_stop_or_has_nothing_verified_ends(verified: bool) -> None:
    world = trained(25, on_corruption="stop" if verified else "restore")
    if verified:
        sweep(world, 23)
    sweep(world, 24, 1)
    over = world.until_over()
    assert (over["verdict"], over["exit_code"]) == ("failed", 1)
    assert "rank 1 of 3 replicas differs from the others at step 23 in c" in over["reason"]


def test_digests_of_a_round_that_is_over_are_forgotten() -> None:
    world = trained(15)
    run = world.controller.run
    found = m.EqualReplicas("g", 3, 5, struct.pack(f"<{PARTS}Q", 9, 9, 9, 9), (0,))
    hear(world, m.ReplicasDigested("n1", run.epoch, run.round, 16, 0, PARTS, (found,)))
    world.fail_rank(1)
    world.until_round(1)
    world.until_step(15)
    sweep(world, 16)
    assert world.records("digests_differ") == []


def test_a_verdict_on_a_step_names_the_node_of_its_rank() -> None:
    world = trained(15)
    run = world.controller.run
    found = Judgement(14, "persistent", 2, "loss is NaN", device="n3 cuda:0", tries=5)
    hear(world, m.ResultJudged("n1", run.epoch, run.round, 0, found))
    hear(world, m.ResultJudged("n1", run.epoch, run.round, 0, Judgement(14, "noise", difference=0.0)))
    (judged,), (noise,) = world.records("result_judged"), world.records("noise_measured")
    assert (judged["rank"], judged["node"], judged["device"], judged["said_by"]) == (2, "n3", "n3 cuda:0", 0)
    assert (noise["difference"], noise.get("peer_difference")) == (0.0, None)


def test_a_step_that_is_committed_after_its_sweep_is_verified_then() -> None:
    world = trained(15)
    sweep(world, 24)
    world.until_step(24)
    world.run(lambda: world.controller.run.verified_steps == {10, 20}, limit_s=5)
    assert [event["step"] for event in world.records("step_verified")] == [10, 20]


def test_the_next_controller_knows_which_steps_are_verified() -> None:
    world = trained(25)
    sweep(world, 24)
    world.fail_rank(2)
    world.until_round(1)
    world.kill_agent("n1")
    world.start_agent("n1")
    world.until_round(2)
    assert world.controller.run.verified_steps == {10, 20}


@pytest.mark.parametrize("policy", ["stop", "restore"])
def test_a_run_that_is_only_observed_goes_on(policy: str) -> None:
    world = trained(25, on_corruption=policy, mode=Mode.OBSERVE)
    sweep(world, 24, 1)
    world.run(limit_s=3)
    assert len(world.records("digests_differ")) == 1
    assert world.records("verdict") == world.records("decision") == []
