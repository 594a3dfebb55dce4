"""A run is complete when what its ranks saved last is durable, though their script did not wait for that."""

from __future__ import annotations

import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.checkpoints.commits import CommitTracker
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

SLOW_S = 5.0


@pytest.fixture
def world() -> World:
    """Its ranks have ended, and the save after their last step, 20, is on its way."""
    made = World(nodes=3, script=Script(steps=20))
    made.until_step(19)
    made.slow_savers = dict.fromkeys(made.sites, SLOW_S)
    made.run(lambda: bool(made.records("last_save")))
    return made


def test_the_run_ends_when_it_is_committed(world: World) -> None:
    world.run(limit_s=SLOW_S - 1)
    assert world.directory.verdict is None
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 20)
    assert world.records("last_save") == [{"step": 20}]
    assert len(world.starts) == 1


def test_or_could_not_be_written(world: World) -> None:
    world.saver_fails = {("n2", 20)}
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 10)
    assert [fields["node"] for fields in world.records("persist_failed")] == ["n2"]


def test_a_node_that_is_lost_meanwhile_costs_a_restart_and_not_the_save() -> None:
    world = World(nodes=3, spares=1, script=Script(steps=20))
    world.until_step(19)
    world.slow_savers = dict.fromkeys(world.sites, SLOW_S)
    world.run(lambda: bool(world.records("last_save")))
    world.power_off("n2")
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 20)
    assert "n4" in world.members()


def test_so_does_a_controller_that_is_killed(world: World) -> None:
    world.kill_agent(world.controller.run.node)
    world.start_agent("n1")
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 20)


def test_a_stop_waits_no_longer_than_it_may() -> None:
    hung = World(nodes=2, script=Script(steps=20), stop_grace_s=8.0)
    hung.until_step(19)
    hung.slow_savers = dict.fromkeys(hung.sites, 1e6)
    hung.run(lambda: bool(hung.records("last_save")))
    hung.warn("TERM")
    verdict = hung.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("terminated", 10)


def test_a_snapshot_of_which_the_controller_hears_later_than_of_the_end() -> None:
    world = World(nodes=2, script=Script(steps=20))
    world.until_step(19)
    agent = world.agents["n2"]
    say, held = agent.to_controller, []

    def late(message: m.ToController) -> None:
        if isinstance(message, m.SnapshotWhole):
            held.append(message)
        else:
            say(message)

    agent.to_controller = late  # type: ignore[method-assign]
    world.run(lambda: bool(world.records("last_save")))
    world.run(limit_s=3.0)
    assert world.directory.verdict is None
    say(held[-1])
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 20)


@pytest.mark.parametrize("word_s", [0.0, 2.0])  # later than the first steps of the others
def test_an_order_to_write_that_comes_before_the_round_is_given_again(word_s: float) -> None:
    world = World(nodes=2, script=Script(steps=60, save_every=10))
    world.until_step(10)
    world.slow_savers = dict.fromkeys(world.sites, 1000.0)
    world.run(lambda: world.step >= 25)
    world.slow_savers.clear()
    world.fail_rank(0)
    agent = world.agents["n2"]
    hear, starts = agent._hear, []

    def overtaken(message: m.ToAgent) -> None:
        if isinstance(message, m.Start) and not starts:
            starts.append(message)
            world.after(0.5, lambda: hear(message))
        else:
            hear(message)

    say = agent.to_controller

    def late(message: m.ToController) -> None:
        if isinstance(message, m.RanksStarted):
            world.after(word_s, lambda: say(message))
        else:
            say(message)

    agent._hear = overtaken  # type: ignore[method-assign]
    agent.to_controller = late  # type: ignore[method-assign]
    world.until_round(1)
    assert world.last.restore == m.RestorePoint(Tier.MEMORY, 20)
    world.run(lambda: max(world.directory.committed, default=0) >= 20, limit_s=5.0)


def test_what_is_settled() -> None:
    commits = CommitTracker()
    commits.begin(["n1"])
    assert (commits.is_settled(-1), commits.is_settled(5)) == (True, False)
    assert commits.snapshot_whole("n1", 5) == 5
    assert not commits.is_settled(5)
    assert commits.abandon(5) is None
    assert (commits.is_settled(5), commits.is_settled(6)) == (True, False)
    commits.begin(["n1"])
    assert not commits.is_settled(5)
    commits.commit(7)
    assert commits.is_settled(6)


@pytest.mark.parametrize(("node", "kind"), [("n1", m.PersistStep), ("n2", m.PersistStep), ("n1", m.CommitStep)])
def test_an_order_that_is_lost_is_given_again(node: str, kind: type[m.ToAgent]) -> None:
    world = World(nodes=2, script=Script(steps=20))
    world.until_step(5)
    agent, lost = world.agents[node], []
    hear = agent._hear

    def deaf(message: m.ToAgent) -> None:
        if isinstance(message, kind) and not lost:
            lost.append(message)
        else:
            hear(message)

    agent._hear = deaf  # type: ignore[method-assign]
    verdict = world.until_over()
    assert lost
    assert (verdict["verdict"], verdict["committed"]) == ("completed", 20)
    assert len(world.starts) == 1


def test_files_are_not_written_anew_by_an_order_that_comes_after_that_to_commit() -> None:
    world = World(nodes=2, script=Script(steps=20))
    world.until_step(5)
    agent = world.agents["n1"]
    hear, persist = agent._hear, agent.persist
    orders: list[m.ToAgent] = []
    written: list[int] = []

    def twice(message: m.ToAgent) -> None:
        hear(message)
        if isinstance(message, m.PersistStep | m.CommitStep):
            orders.append(message)
            hear(orders[-2] if isinstance(message, m.CommitStep) else message)

    def write(message: m.PersistStep, member: m.Member, world_size: int) -> None:
        written.append(message.step)
        persist(message, member, world_size)

    agent._hear = twice  # type: ignore[method-assign]
    agent.persist = write  # type: ignore[method-assign]
    assert world.until_over()["committed"] == 20
    assert written == [10, 20]
