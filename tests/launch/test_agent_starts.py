"""How agents are started again: for how long, how fast, and when not any more."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.allocation.restart_policy import (
    LONGEST_DELAY_S,
    QUIET_RETRY_S,
    QUIET_STEPS,
    Attempts,
    Launches,
    Pace,
    agent_ran,
)
from resilio_hpc.launch.config.agent_settings import AGENT_FAILED, AGENT_LIVES


@pytest.mark.parametrize(
    ("code", "ran"),
    [
        (1, False),  # slurmctld does not answer
        (233, False),  # "Task launch failed on node n3: Communication connection failure"
        (2, False),  # execve of the interpreter failed on the node
        (0, True),  # 22.05: the node of the step was lost
        (137, True),  # the agent was killed
        (-9, True),  # srun was killed
        (AGENT_FAILED, True),
        (AGENT_LIVES, True),
    ],
)
def test_what_an_sruns_exit_code_tells_of_its_agent(code: int, ran: bool) -> None:
    assert agent_ran(code, lived_s=4.0) is ran
    assert agent_ran(code, lived_s=300.0)


def outage(attempts: Attempts, length_s: float, each_s: float, code: int) -> float:
    """Starts fail, each after ``each_s``, for ``length_s``; returns when the first start after that is made."""
    now = 0.0
    while now < length_s and not attempts.given_up:
        attempts.started(now)
        attempts.ended(now + each_s, code, launched_by_srun=True)
        now = attempts.next_start
    return now


@pytest.mark.parametrize(("each_s", "code"), [(4.0, 1), (6.0, 233), (0.03, 1)])
def test_a_slurm_that_cannot_launch_for_minutes_uses_up_no_patience(each_s: float, code: int) -> None:
    attempts = Attempts(patience_s=600.0)
    back = outage(attempts, 300.0, each_s, code)
    assert not attempts.given_up
    assert back <= 300.0 + each_s + LONGEST_DELAY_S
    attempts.started(back)
    attempts.ended(back + 1.0, -9, launched_by_srun=True)  # then the srun is killed: started again at once
    assert attempts.next_start <= back + 1.1


def test_it_is_not_tried_for_longer_than_nodes_may_join() -> None:
    attempts = Attempts(patience_s=100.0)
    assert outage(attempts, 1000.0, 4.0, 1) < 120.0
    assert attempts.given_up


def test_agents_that_end_again_and_again_are_given_up_after_seconds() -> None:
    for by_srun, code in ((True, AGENT_FAILED), (True, 137), (False, 1)):
        attempts = Attempts(patience_s=600.0)
        now = 0.0
        while not attempts.given_up:
            attempts.started(now)
            attempts.ended(now + 0.2, code, by_srun)
            now = attempts.next_start
            assert now < 10.0
        assert attempts.starts == 6


@pytest.mark.parametrize("code", [0, AGENT_LIVES])
def test_ends_that_are_no_breakdown_are_followed_by_a_long_wait_and_never_given_up(code: int) -> None:
    attempts = Attempts(patience_s=100.0)
    now = 0.0
    for number in range(1, 50):
        attempts.started(now)
        assert not attempts.in_order
        assert attempts.ended(now + 1.0, code, launched_by_srun=True)
        assert attempts.in_order is (code == 0)
        assert attempts.next_start == now + 1.0 + QUIET_RETRY_S * min(number, QUIET_STEPS)
        now = attempts.next_start
    assert not attempts.given_up


def test_an_agent_that_ends_now_and_then_is_always_started_again() -> None:
    attempts = Attempts(patience_s=600.0)
    for minute in range(100):
        attempts.started(minute * 60.0)
        attempts.ended(minute * 60.0 + 55.0, -9, launched_by_srun=True)
        assert not attempts.given_up
        assert attempts.next_start < minute * 60.0 + 60.0


def test_it_is_hopeless_only_when_no_agent_ever_ran_on_any_node() -> None:
    broken, one_dead_node = Launches(placements=4), Launches(placements=4)
    one_dead_node.count(ran=True)
    for _ in range(24):
        assert not broken.hopeless([])
        for launches in (broken, one_dead_node):
            launches.count(ran=False)
    assert broken.hopeless([0.0, 0.3])
    assert not broken.hopeless([0.0, 20.0])  # one lasts: its agent may live
    assert not one_dead_node.hopeless([])


def starts(pace: Pace, seconds: float, answering: bool = True, tick_s: float = 0.05) -> list[int]:
    """How many of very many starts are allowed in each tick."""
    counts = []
    for tick in range(round(seconds / tick_s)):
        count = 0
        while pace.take(1000.0 + tick * tick_s, answering):
            count += 1
        counts.append(count)
    return counts


def test_starts_are_ramped() -> None:
    counts = starts(Pace(per_s=20.0, at_once=16), 10.0)
    assert counts[0] == 16
    assert max(counts[1:]) <= 2
    assert 16 + 195 <= sum(counts) <= 16 + 200


def test_while_slurm_does_not_answer_there_is_one_start_per_second() -> None:
    pace = Pace(per_s=20.0, at_once=16)
    assert sum(starts(pace, 10.0, answering=False)) in (10, 11)
    assert max(starts(pace, 1.0)[1:]) <= 2  # and no burst when it answers again
