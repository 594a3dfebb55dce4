"""Commits and restore points in a virtual cluster. Its ranks notice when copies of different lives are mixed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

MEMORY, COMMITTED = "memory", "committed"


def test_every_step_that_all_hold_is_made_durable_newest_first() -> None:
    world = World(nodes=3)
    world.until_step(45)
    assert sorted(world.directory.committed) == [10, 20, 30, 40]
    slow = World(nodes=3)
    slow.save_s = 2.5  # three snapshots pass while one is written
    slow.until_step(95)
    steps = sorted(slow.directory.committed)
    assert steps[0] == 10
    assert all(later - earlier >= 20 for earlier, later in pairwise(steps))


def test_a_step_that_cannot_be_written_is_passed_over() -> None:
    world = World(nodes=3)
    world.saver_fails = {("n2", 10), ("n3", 20)}
    world.until_step(35)
    assert sorted(world.directory.committed) == [30]
    assert [fields["step"] for fields in world.records("persist_failed")] == [10, 20]


def test_memory_is_restored_only_if_every_rank_has_the_step() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(27)
    world.power_off("n3")
    world.until_round(1)
    restored = {rank: world.last.restore_of(rank) for rank in range(6)}
    assert restored == {rank: m.RestorePoint(Tier.MEMORY if rank < 4 else COMMITTED, 20) for rank in range(6)}


def test_another_world_size_restores_the_committed_step() -> None:
    world = World(nodes=4, minimum=3, slots=1)
    world.until_step(27)
    world.power_off("n4")
    world.until_round(1)
    assert world.last.restore == m.RestorePoint(COMMITTED, 20)


def test_memory_that_is_newer_than_the_directory_is_restored_and_made_durable() -> None:
    world = World(nodes=2)
    world.saver_fails = {("n1", 20)}
    world.until_step(23)
    assert sorted(world.directory.committed) == [10]
    world.saver_fails = set()
    world.fail_rank(1)
    world.until_round(1)
    assert world.last.restore == m.RestorePoint(MEMORY, 20)
    world.run(lambda: 20 in world.directory.committed)
    assert world.records("committed")[0]["blocked_s"] > 0  # what the slowest rank's training waited for the snapshot
    world.run(lambda: world.records("first_step")[-1]["round"] > 0)
    assert [record["restore_s"] for record in world.records("first_step")] == [0.0, 0.01]


def test_bad_copies_are_left_out_down_to_the_older_committed_step() -> None:
    world = World(nodes=2, max_without_progress=10)
    world.bad_copies = {m.RestorePoint(MEMORY, 20), m.RestorePoint(MEMORY, 10), m.RestorePoint(COMMITTED, 20)}
    world.until_step(27)
    world.fail_rank(1)
    world.run(lambda: world.records("first_step")[-1]["round"] > 0)
    tried = [start.restore for _, start in world.starts[1:]]
    wanted = [(MEMORY, 20), (COMMITTED, 20), (MEMORY, 10), (COMMITTED, 10)]
    assert tried == [m.RestorePoint(source, step) for source, step in wanted]
    assert world.last.state.bad_copies
    assert 20 not in world.last.state.committed


def test_a_bad_copy_stays_bad_for_the_next_controller() -> None:
    world = World(nodes=3, max_without_progress=10)
    world.bad_copies = {m.RestorePoint(MEMORY, 20), m.RestorePoint(COMMITTED, 20)}
    world.until_step(23)
    world.fail_rank(5)
    world.run(lambda: world.records("first_step")[-1]["round"] > 0)
    world.kill_agent("n1")
    world.run(limit_s=1.0)
    world.start_agent("n1")
    rounds = len(world.starts)
    world.run(lambda: len(world.starts) > rounds)
    assert world.last.restore == m.RestorePoint(MEMORY, 10)
    assert world.controller.run.node == "n2"


def test_snapshots_beyond_the_restore_point_are_forgotten() -> None:
    world = World(nodes=3, spares=1)
    world.save_s = 0.9
    world.until_step(35)
    world.power_off("n2")
    world.run(lambda: len(world.starts) == 2)
    restore = world.last.restore
    assert restore is not None
    assert restore.step < 30
    assert world.last.restore_of(2) == m.RestorePoint(COMMITTED, restore.step)
    world.run(limit_s=0.01)
    kept = {step for name in world.members() for _, step in world.sites[name].memory}
    assert max(kept, default=-1) <= restore.step


def test_a_node_that_waits_while_others_go_on_keeps_no_copies() -> None:
    """n4 does not fit into the smaller round; when it takes part again, its copies would be of another life."""
    world = World(nodes=4, minimum=2, unit=2, slots=1)
    world.until_step(27)
    assert world.sites["n4"].memory
    world.power_off("n2")
    world.until_round(1)
    assert world.members() == ["n1", "n3"]
    assert world.sites["n4"].memory == {}


def test_a_node_that_missed_a_start_and_comes_back_keeps_no_copies() -> None:
    """It holds the same step as the others by number, computed in a life that they have left."""
    world = World(nodes=2, spares=1, slots=1, script=Script(save_every=10))
    world.until_step(12)
    world.slow_savers = dict.fromkeys(world.sites, 1000.0)
    world.until_step(24)
    assert 20 not in world.directory.committed
    world.slow_savers.clear()
    world.cut("n2")
    world.until_round(1)  # from the committed step 10 on, with the spare
    world.run(lambda: 20 in world.directory.committed)
    assert world.members() == ["n1", "n3"]
    world.power_off("n3")
    world.run(lambda: world.records("node_lost")[-1]["node"] == "n3" or world.controller.run.phase == "gathering")
    world.cut("n2", False)
    world.until_round(2)
    assert (world.members(), world.last.restore) == (["n1", "n2"], m.RestorePoint(Tier.COMMITTED, 20))
    world.fail_rank(0)  # before anything is saved
    world.until_round(3)
    assert world.last.restore == m.RestorePoint(Tier.COMMITTED, 20)
    assert set(world.sites["n2"].memory) == set()


def test_copies_of_a_node_that_knows_no_start_do_not_count() -> None:
    world = World(nodes=2)
    world.until_step(25)
    world.kill_agent("n2")
    world.sites["n2"].kept = None  # its local disk was cleaned, its shared memory not
    world.start_agent("n2")
    world.until_round(1)
    assert world.last.restore == m.RestorePoint(COMMITTED, 20)


def test_a_node_lost_while_a_commit_is_in_flight_leaves_the_old_step() -> None:
    world = World(nodes=3, spares=1)
    world.until_step(15)
    world.save_s = 3.0
    world.run(lambda: any(isinstance(x, m.PersistStep) and x.step == 20 for x in world.agents["n2"].heard))
    world.power_off("n2")
    world.until_round(1)
    assert world.last.restore_of(2) == m.RestorePoint(COMMITTED, 10)


def test_a_file_of_an_earlier_life_is_never_part_of_a_commit() -> None:
    """The saver still writes step 20 of the first life when the second takes its own step 20."""
    world = World(nodes=2, slots=1, script=Script(step_s=0.02, save_every=10, start_s=0.05))
    world.until_step(19)
    world.save_s, world.slow_savers = 0.1, {"n1": 1.0}
    world.until_step(20)
    world.bad_copies = {m.RestorePoint(MEMORY, 20)}
    world.run(limit_s=0.1)
    world.fail_rank(1)
    world.until_round(1)
    world.bad_copies = set()
    world.run(lambda: max(world.directory.committed) >= 20)


def test_a_broken_connection_does_not_stop_the_commits() -> None:
    for offset in (0.0, 0.0015, 0.0025, 0.1, 0.2025, 0.2035, 0.21):
        world = World(nodes=3)
        world.until_step(10)
        world.run(limit_s=offset)
        world.cut("n2")
        world.run(limit_s=0.05)
        world.cut("n2", False)
        world.break_connection("n2")
        world.until_step(25)
        assert sorted(world.directory.committed) == [10, 20], offset
        assert len(world.starts) == 1


def test_a_commit_whose_answer_was_lost_with_its_node_is_found_in_the_run_directory() -> None:
    world = World(nodes=4, minimum=2, script=Script(save_every=10))
    world.run(lambda: 10 in world.directory.committed)
    world.kill_agent("n1")  # n2 leads now
    world.start_agent("n1")
    world.until_round(1)
    assert world.controller.run.node == "n2"
    world.run(lambda: 40 in world.directory.committed)
    world.cut("n1")
    world.until_round(2)
    assert world.last.restore == m.RestorePoint(Tier.COMMITTED, 40)


def test_a_commit_that_is_being_made_is_awaited_before_a_round_goes_back() -> None:
    world = World(nodes=2, script=Script(save_every=10))
    world.run(lambda: any(isinstance(message, m.CommitStep) for message in world.agents["n1"].heard))
    assert world.directory.committed == {}
    world.sites["n2"].memory.clear()
    for site in world.sites.values():
        site.stop_s = 0.001  # the manifest takes longer
    world.fail_rank(3)
    world.until_round(1)
    assert world.last.restore == m.RestorePoint(Tier.COMMITTED, 10)


def test_a_commit_that_hung_with_the_run_directory_is_in_before_another_controller_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(nodes=3, minimum=2, script=Script(save_every=10))
    asked: list[Callable[[], None]] = []
    committing: list[Callable[[], None]] = []
    ask, commit = world.storage.ask, VirtualAgent.commit
    monkeypatch.setattr(VirtualAgent, "commit", lambda *order: committing.append(partial(commit, *order)))
    world.run(lambda: bool(committing))
    monkeypatch.setattr(world.storage, "ask", lambda *request: asked.append(partial(ask, *request)))  # it hangs
    world.cut("n1")
    world.sites["n3"].memory.clear()
    world.run(lambda: any(one.run.node == "n2" and one.run.may_prepare for one in world.controllers()))
    world.run(limit_s=5.0)
    while not world.controller.run.informed:  # it answers again, to what was asked before the epoch was to be recorded
        asked.pop(0)()
        world.run(limit_s=0.01)
    for late in committing:
        late()
    while len(world.starts) < 2:
        world.run(limit_s=0.1)
        while asked:
            asked.pop(0)()
    assert world.last.restore == m.RestorePoint(Tier.COMMITTED, 10)


@pytest.fixture
def left_behind(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Callable[[], None]]:
    """A run that waited in vain for the commit of step 20 and went on from step 10; and that commit's end."""
    world = World(nodes=3, spares=1)
    world.run(lambda: 10 in world.directory.committed)
    committing: list[Callable[[], None]] = []
    save, commit = world.storage.save, VirtualAgent.commit

    def hangs(agent: VirtualAgent, message: m.CommitStep) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(world.storage, "save", lambda *write: committing.append(partial(save, *write)))
            commit(agent, message)

    with monkeypatch.context() as patch:
        patch.setattr(VirtualAgent, "commit", hangs)
        world.run(lambda: bool(committing))
        world.power_off("n3")
        world.run(lambda: len(world.starts) == 2)
    assert world.last.restore is not None
    assert world.last.restore.step == 10
    return world, committing[0]


def test_a_commit_of_a_life_that_was_left_is_not_taken_for_one_of_this_life(
    left_behind: tuple[World, Callable[[], None]],
) -> None:
    world, late = left_behind
    phase = world.controller.checkpoints
    world.run(lambda: phase._commits.in_flight == 20)
    told = len(world.agents["n1"].heard)
    late()
    world.run(lambda: bool(world.records("commit_late")))
    assert world.records("commit_late") == [{"step": 20, "round": 0}]
    assert not any(isinstance(heard, m.StageReached) for heard in world.agents["n1"].heard[told:])
    assert phase._commits.in_flight == 20
    world.run(lambda: world.directory.committed[20] == ((0, 1, 0), (10, 1, 1)))


def test_a_commit_of_this_life_counts_in_a_later_round_too(left_behind: tuple[World, Callable[[], None]]) -> None:
    world, _ = left_behind
    phase = world.controller.checkpoints
    world.run(lambda: 20 in world.directory.committed)
    world.controller.run.committed_steps.discard(10)  # it was not heard of
    phase.handle(m.ManifestWritten("n1", world.controller.run.epoch, 0, 10, 0.1))
    assert 10 in world.controller.run.committed_steps
    assert not world.records("commit_late")
