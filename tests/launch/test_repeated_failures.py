"""A program's own mistake is not tried for ever, and nothing is called recovered before it is."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.controller.facts.repeated_failure import SURVIVED_S, Repeatable, repeatable
from resilio_hpc.launch.protocol.messages import RankFailure
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

RAISED = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    load()\n'
CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"


def raised(message: str, node: str = "n1", code: int = 1, traceback: str = RAISED) -> RankFailure:
    return RankFailure(node, 0, 0, "exit", 1.0, code, None, message, traceback)


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (raised("ValueError: pid 17 at 0x7f"), raised("ValueError: pid 18 at 0xaa", "n2"), True),
        (raised("ValueError: a"), raised("ValueError: b"), False),
        (raised("ModuleNotFoundError: No module named 'x'"), raised("ModuleNotFoundError: No module named 'x'"), True),
        (
            raised("failed, exit code 2", code=2, traceback=""),
            raised("failed, exit code 2", code=2, traceback=""),
            True,
        ),
        (raised("failed, exit code 1", traceback=""), raised("failed, exit code 1", traceback=""), False),
        (
            raised("torch.OutOfMemoryError: CUDA out of memory"),
            raised("torch.OutOfMemoryError: CUDA out of memory"),
            True,
        ),
        (raised(CUDA), raised(CUDA), False),  # it may be that GPU
        (raised(CUDA), raised(CUDA, "n2"), True),
        (raised("RuntimeError: uncorrectable ECC error encountered"),) * 2 + (False,),
        (raised("OSError: [Errno 5] Input/output error: 'x.bin'"),) * 2 + (False,),
        (raised("OSError: [Errno 116] Stale file handle"),) * 2 + (False,),
        (raised("RuntimeError: NCCL error: remote process exited or there was a network error"),) * 2 + (False,),
        (RankFailure("n1", 0, 0, "signal", 1.0, None, 11),) * 2 + (False,),
        (RankFailure("n1", 0, 0, "early_exit", 1.0, 0, None, "exited with 0 after 3 steps"),) * 2 + (True,),
    ],
)
def test_what_counts_as_the_same_mistake(first: RankFailure, second: RankFailure, again: bool) -> None:
    before, now = repeatable(first, 5, survived=False), repeatable(second, 5, survived=False)
    assert (before is not None and now is not None and now.is_again(before)) is again
    if before is not None:
        assert Repeatable.from_text(before.to_text()) == before
    later = repeatable(second, 6, survived=False)
    assert before is None or later is None or not later.is_again(before)


def test_what_ranks_without_steps_survived_for_a_while_is_no_mistake_of_the_program() -> None:
    assert repeatable(raised("ValueError: a"), -1, survived=True) is None
    assert repeatable(raised("ImportError: a"), -1, survived=True) is not None  # imports may take long


def fail_at(world: World, step: int, number: int, message: str) -> None:
    world.run(lambda: world.starts != [] and world.last.state.round == number and world.step >= step)
    world.fail_rank(3, exit_code=1, signal=None, message=message, traceback=RAISED)


def test_the_same_exception_at_the_same_step_ends_the_run_after_the_second_time() -> None:
    world = World(nodes=2, max_without_progress=9, script=Script(save_every=1000))
    for number in range(2):
        fail_at(world, 3, number, f"KeyError: {number}")
    verdict = world.until_over()
    assert (verdict["verdict"], verdict["exit_code"]) == ("no_progress", 1)
    assert "the same failure again" in verdict["reason"]
    assert verdict["first_failure"]["rank"] == 3
    assert len(world.starts) == 2
    assert world.records("recovered") != []  # the first time, steps were done


def test_the_next_controller_knows_what_broke_the_round_before() -> None:
    world = World(nodes=3, max_without_progress=9, script=Script(save_every=1000))
    fail_at(world, 3, 0, "KeyError: 0")
    world.until_round(1)
    assert "KeyError" in world.last.state.broken_by
    assert all("KeyError" in site.kept.broken_by for site in world.sites.values() if site.kept is not None)


def test_another_step_or_another_exception_is_tried_again() -> None:
    world = World(nodes=2, max_without_progress=3, script=Script(save_every=1000))
    for number, (step, message) in enumerate(((3, "KeyError: 0"), (5, "KeyError: 0"), (5, "ValueError: 0"))):
        fail_at(world, step, number, message)
    world.until_round(3)


def test_ranks_that_tell_of_no_steps_are_recovered_when_they_have_survived_for_a_while() -> None:
    world = World(nodes=2, script=Script(attached=False, steps=100_000))
    world.run(lambda: bool(world.starts) and world.life.step >= 3)
    world.fail_rank(1)
    world.run(lambda: len(world.starts) == 2 and world.life.step >= 3)
    world.run(limit_s=SURVIVED_S - 5)
    assert world.records("recovered") == []
    world.run(lambda: world.records("recovered") != [])
    (told,) = world.records("recovered")
    assert (told["kind"], told["rank"], told["recovery_s"]) == ("rank_killed", 1, None)


def test_ranks_that_have_attached_before_are_recovered_with_their_first_step_however_long_they_load() -> None:
    world = World(nodes=2, script=Script(start_s=SURVIVED_S + 10, step_s=1000.0))
    world.run(lambda: any(controller.run.attached for controller in world.controllers()), limit_s=SURVIVED_S + 20)
    world.fail_rank(1)
    world.run(lambda: len(world.starts) == 2)
    world.run(limit_s=SURVIVED_S + 5)
    assert world.records("recovered") == []


def test_a_rank_that_never_attaches_beside_others_that_train_is_a_failure() -> None:
    world = World(nodes=2, slots=1, script=Script(stays_out=1))
    world.until_round(1)
    (failed,) = world.records("rank_failed")
    assert (failed["node"], failed["rank"], failed["kind"]) == ("n2", 1, "early_exit")


def test_the_true_failure_is_named_though_its_rank_was_stopped_before_it_could_end() -> None:
    world = World(nodes=2, slots=1)
    world.until_step(12)
    world.sites["n2"].stop_s = 1.0
    began = world.unix()
    world.fail_rank(0, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer", traceback=RAISED)
    world.run(lambda: world.agents["n2"].core.ranks.stop.under_way)
    (ranks := world.agents["n2"].core.ranks).ends.exited(ranks.local, 0, (None, 9), began, ("KeyError: 1", RAISED))
    world.run(lambda: world.records("recovered") != [])
    assert world.records("recovered")[0]["rank"] == 1


def test_an_echo_alone_waits_for_its_cause_before_the_run_is_given_up() -> None:
    world = World(nodes=2, slots=1, max_without_progress=0)
    world.until_step(12)
    world.fail_rank(0, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer", traceback=RAISED)
    world.run(limit_s=0.5)
    world.fail_rank(1, exit_code=1, signal=None, message="KeyError: 1", traceback=RAISED)
    assert world.until_over()["first_failure"]["message"] == "KeyError: 1"


def test_ranks_that_handle_sigterm_have_a_grace_which_ends_with_their_lease() -> None:
    world = World(nodes=3, slots=1, heartbeat_timeout_s=5.0)
    world.failure_grace_s = 100.0
    for agent in world.agents.values():
        agent.core.ranks._graces = type(agent.core.ranks._graces)(100.0)
    world.until_step(12)
    world.sites["n2"].heeds_s = 0.5
    failed_at = world.now
    world.fail_rank(0)
    world.until_round(1)
    assert world.now - failed_at >= 0.5
    world.sites["n2"].heeds_s = 100.0
    world.fail_rank(0)
    world.run(lambda: world.agents["n2"].core.ranks.stop.under_way)
    world.cut("n2")
    world.run(lambda: not world.agents["n2"].rank_rounds(), limit_s=6.0)


@pytest.mark.parametrize("message", ["RuntimeError: CUDA error: the GPU has fallen off the bus", "ValueError: other"])
def test_another_fault_while_ranks_start_is_not_the_same_mistake_again(message: str) -> None:
    world = World(nodes=2, max_without_progress=9, script=Script(save_every=1000, start_s=2.0))
    fail_at(world, 3, 0, "KeyError: 0")
    # before any rank has done a step again: the recovery is still open
    world.run(lambda: world.last.state.round == 1 and len(world.records("ranks_started")) == 4)
    world.fail_rank(1, exit_code=1, signal=None, message=message, traceback=RAISED)
    world.until_round(2)
    assert world.records("verdict") == []
