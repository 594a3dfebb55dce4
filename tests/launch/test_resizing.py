"""When a run grows, shrinks, and stays as it is: decisions as tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.autoparallel import Inventory, Pool, Throughput, Waiting
from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.resize.facts import JoinerJob, ResizeDecision, ResizeFacts, Successor
from resilio_hpc.launch.resize.policy import resize_policy
from resilio_hpc.launch.resize.resizing import decide

POLICY = resize_policy()
NODES = tuple(f"n{number}" for number in range(1, 13))
LINEAR = Throughput(compute_s=8.0, communication_s=0.0, assumed=False)
OTHER = Waiting("99", "bob", ("main",), 1)


def cluster(idle: int, *waiting: Waiting, planned: int = 0, **pool: Any) -> Inventory:
    """Twelve nodes, the last of which are idle."""
    free = NODES[len(NODES) - idle :]
    kept = NODES[len(NODES) - idle - planned : len(NODES) - idle]
    return Inventory((Pool("main", "h100", 8, NODES, free, kept, **pool),), waiting)


def facts(**changes: Any) -> ResizeFacts:
    """Four nodes train, four more could, and are idle."""
    plain = ResizeFacts(
        phase="training", nodes=4, least=2, most=8, unit=1, own_nodes=4, held=frozenset(NODES[:4]), ranks_per_node=8,
        partition="main", inventory=cluster(4), gpu_type="h100", gpus_per_node=8, throughput=LINEAR,
    )  # fmt: skip
    return replace(plain, **changes)


def joiner(job: str, *names: str, state: Any = "running", since_s: float = 3600.0, reason: str = "") -> JoinerJob:
    return JoinerJob(job, max(1, len(names)), names, state, since_s, reason)


def grown(**changes: Any) -> ResizeFacts:
    """Four nodes of its own, and two joiners of one node each; nothing is idle."""
    joiners = (joiner("21", "n5"), joiner("22", "n6", since_s=1800.0))
    plain = facts(nodes=6, held=frozenset(NODES[:6]), joiners=joiners, inventory=cluster(0), own_jobs=frozenset({"7"}))
    return replace(plain, **changes)


def made(given: ResizeFacts, **policy: Any) -> ResizeDecision:
    return decide(given, replace(POLICY, **policy))


def in_short(decision: ResizeDecision) -> tuple[str, str]:
    return decision.action, decision.code


# -- growing ---------------------------------------------------------------------------------------------------------


def test_idle_nodes_are_taken_in_by_small_jobs_with_the_reason_in_numbers() -> None:
    decision = made(facts(restart_s=12.0))
    assert in_short(decision) == ("grow", "idle_nodes")
    assert (decision.nodes, decision.sizes) == (8, (1, 1, 1, 1))
    assert decision.reason == "4 idle nodes: 100% more speed (measured 0% communication), for a restart of 12.0 s"
    assert decision.expected == {"step_s": 1.0, "step_s_now": 2.0}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"nodes": 8}, "at_most"),
        ({"inventory": cluster(0)}, "nothing_idle"),
        ({"inventory": cluster(0, planned=4)}, "nothing_idle"),
        ({"inventory": cluster(2), "avoided": frozenset(NODES[-2:])}, "nothing_idle"),
        ({"inventory": cluster(3), "unit": 4}, "nothing_idle"),
        ({"gpu_type": "a100"}, "nothing_idle"),
        ({"partition": "other"}, "nothing_idle"),
        ({"idle_for_s": dict.fromkeys(NODES, 59.0)}, "not_settled"),
        ({"inventory": cluster(4, OTHER)}, "others_wait"),
        ({"last_resize_s": 599.0}, "cool_down"),
        ({"gpu_utilisation": 0.2}, "idle_gpus"),
        ({"lost_joiners": 2}, "joiners_fail"),
        ({"quota_nodes": 0}, "quota"),
        ({"throughput": None}, "no_step_time"),
        ({"throughput": Throughput(0.1, 2.0, False)}, "no_gain"),
        ({"throughput": Throughput(4.0, 2.0, False)}, "no_gain"),  # faster, but below half of a linear gain
        ({"ends_in_s": 50.0}, "no_gain"),  # the restart does not pay
        ({"global_batch": 32, "micro_batch": 1, "most": 7}, "no_fit"),  # 32 samples: 8, 16, 32 ranks
        ({"phase": "settling"}, "settling"),
        ({"phase": "between_jobs"}, "between_jobs"),
        ({"phase": "over"}, "over"),
    ],
)
def test_reasons_to_stay(changes: dict[str, Any], code: str) -> None:
    assert in_short(made(facts(**changes))) == ("stay", code)


def test_joiners_that_wait_for_a_run_that_is_over_are_withdrawn() -> None:
    over = facts(phase="over", joiners=(joiner("21", "n5"), joiner("22", state="pending")))
    decision = made(over)
    assert (in_short(decision), decision.jobs) == (("withdraw", "over"), ("22",))
    assert in_short(made(replace(over, refused={("withdraw", "over"): "no answer"}))) == ("stay", "over")


def test_nodes_that_failed_lately_are_not_taken_in_and_that_is_said() -> None:
    decision = made(facts(avoided=frozenset({"n12", "n1"})))
    assert (decision.nodes, decision.sizes) == (7, (1, 1, 1))
    assert made(facts(inventory=cluster(1), avoided=frozenset({"n12"}))).reason.endswith("; n12 failed lately")


def test_a_limit_per_user_counts_all_jobs_of_the_user() -> None:
    assert in_short(made(facts(user_nodes=10), max_user_nodes=10)) == ("stay", "user_limit")
    assert made(facts(user_nodes=10), max_user_nodes=12).nodes == 6
    assert made(facts(user_nodes=10)).nodes == 8


@pytest.mark.parametrize(
    ("changes", "nodes", "sizes"),
    [
        ({"inventory": cluster(2)}, 6, (1, 1)),
        ({"quota_nodes": 3}, 7, (1, 1, 1)),
        ({"unit": 2}, 8, (2, 2)),
        ({"unit": 2, "inventory": cluster(3)}, 6, (2,)),
        ({"idle_for_s": {"n12": 61.0, "n11": 300.0, "n10": 3.0}}, 6, (1, 1)),
        ({"global_batch": 240, "micro_batch": 1}, 6, (1, 1)),  # 48 ranks divide 240; 56 and 64 do not; 40 do
        ({"inventory": cluster(4, Waiting("99", "bob", ("other",), 9))}, 8, (1, 1, 1, 1)),
        ({"inventory": cluster(4, OTHER), "own_jobs": frozenset({"99"})}, 8, (1, 1, 1, 1)),
    ],
)
def test_how_many_nodes_are_taken(changes: dict[str, Any], nodes: int, sizes: tuple[int, ...]) -> None:
    decision = made(facts(**changes))
    assert (decision.action, decision.nodes, decision.sizes) == ("grow", nodes, sizes)


def test_no_more_nodes_than_bring_half_of_a_linear_gain() -> None:
    decision = made(facts(throughput=Throughput(compute_s=8.0, communication_s=1.1, assumed=False)))
    assert decision.action == "grow" and decision.nodes == 7
    assert made(facts(throughput=Throughput(8.0, 1.1, False)), min_efficiency=0.0).nodes == 8


def test_a_restart_has_to_pay_before_the_job_ends() -> None:
    assert made(facts(ends_in_s=130.0), restart_s=60.0).action == "grow"  # 100 % of 130 s against twice 60 s
    assert made(facts(ends_in_s=130.0, restart_s=70.0), restart_s=0.0).action == "stay"


# -- giving way ------------------------------------------------------------------------------------------------------


def test_somebody_who_waits_gets_the_newest_joiner_whatever_the_cool_down() -> None:
    decision = made(grown(inventory=cluster(0, OTHER), last_resize_s=1.0))
    assert in_short(decision) == ("shrink", "others_wait")
    assert (decision.jobs, decision.nodes) == (("22",), 5)
    assert decision.reason == "job 99 of bob waits for 1 node, 1 more than are free"


@pytest.mark.parametrize(
    ("wants", "idle", "planned", "jobs"),
    [
        (2, 0, 0, ("22", "21")), (2, 1, 0, ("22",)), (2, 0, 1, ("22",)), (3, 0, 0, ()), (1, 1, 0, ()),
        (3, 1, 0, ("22", "21")),
    ],
)  # fmt: skip
def test_no_more_is_given_than_lets_the_job_start_and_nothing_where_that_cannot(
    wants: int, idle: int, planned: int, jobs: tuple[str, ...]
) -> None:
    other = Waiting("99", "bob", ("main",), wants)
    assert made(grown(inventory=cluster(idle, other, planned=planned))).jobs == jobs


def test_what_is_being_given_is_not_given_twice() -> None:
    leaving = (joiner("21", "n5"), joiner("22", "n6", state="leaving", since_s=5.0))
    decision = made(grown(joiners=leaving, inventory=cluster(0, OTHER)))
    assert in_short(decision) == ("stay", "under_way")


def test_a_job_of_another_partition_is_given_nothing_that_it_cannot_use() -> None:
    elsewhere = Waiting("99", "bob", ("other",), 1)
    assert made(grown(inventory=cluster(0, elsewhere))).action == "stay"


def test_a_run_keeps_the_nodes_without_which_it_could_not_go_on() -> None:
    other = Waiting("99", "bob", ("main",), 2)
    assert made(grown(inventory=cluster(0, other), least=5)).action == "stay"


# -- what is under way -----------------------------------------------------------------------------------------------


def test_a_joiner_that_does_not_start_is_withdrawn() -> None:
    waiting = joiner("23", state="pending", since_s=121.0, reason="Resources")
    assert in_short(made(grown(joiners=(waiting,)))) == ("withdraw", "too_late")
    early = replace(waiting, since_s=5.0)
    assert in_short(made(grown(joiners=(early,)))) == ("stay", "under_way")
    limited = replace(early, reason="QOSMaxNodePerUserLimit")
    assert in_short(made(grown(joiners=(limited,)))) == ("withdraw", "limit")
    assert in_short(made(grown(joiners=(early,), inventory=cluster(0, OTHER)))) == ("withdraw", "others_wait")


def test_a_joiner_that_finds_no_commit_to_leave_after_is_ended() -> None:
    slow = (joiner("21", "n5"), joiner("22", "n6", state="leaving", since_s=121.0))
    decision = made(grown(joiners=slow))
    assert (in_short(decision), decision.jobs) == (("end", "leave_overdue"), ("22",))


def test_nothing_is_decided_while_agents_of_a_joiner_start() -> None:
    assert in_short(made(grown(joiners=(joiner("23", "n9"),)))) == ("stay", "under_way")


def test_nothing_is_decided_while_nodes_wait_for_a_commit_to_take_part() -> None:
    assert in_short(made(facts(held=frozenset(NODES[:5])))) == ("stay", "under_way")
    assert made(facts(held=frozenset(NODES[:5]), spares=1)).action == "grow"


# -- undoing ---------------------------------------------------------------------------------------------------------


def test_a_joiner_that_brings_too_little_goes_but_not_for_a_small_difference() -> None:
    assert in_short(made(grown(throughput=Throughput(1.0, 2.0, False)))) == ("shrink", "poor_scaling")
    near = Throughput(compute_s=5.0, communication_s=1.0, assumed=False)  # 45 % of a linear gain: below 50, above 40 %
    assert in_short(made(grown(throughput=near))) == ("stay", "nothing_idle")
    assert in_short(made(grown(throughput=Throughput(1.0, 2.0, True)))) == ("stay", "nothing_idle")  # an assumption


def test_idle_gpus_are_given_back() -> None:
    decision = made(grown(gpu_utilisation=0.1))
    assert (in_short(decision), decision.jobs) == (("shrink", "idle_gpus"), ("22",))


# -- the chain -------------------------------------------------------------------------------------------------------


def test_the_next_job_gets_the_size_that_becomes_free_with_this_one() -> None:
    decision = made(grown(successor=Successor("8", 4, False)))
    assert (in_short(decision), decision.jobs, decision.sizes) == (("reshape", "follow_size"), ("8",), (6,))
    assert made(grown(successor=Successor("8", 6, False))).action == "stay"
    assert made(grown(successor=Successor("8", 4, False)), reshape_successor=False).action == "stay"
    assert made(facts(successor=Successor("8", 6, False))).sizes == (4,)  # joiners have left


def test_a_lost_node_does_not_make_the_next_job_smaller() -> None:
    lost = facts(nodes=3, held=frozenset(NODES[:3]), inventory=cluster(0), successor=Successor("8", 4, False))
    assert made(lost).action == "stay"


def test_a_next_job_that_waits_for_nodes_starts_with_those_that_are_free() -> None:
    waiting = facts(phase="between_jobs", nodes=0, held=frozenset(), successor=Successor("8", 8, True))
    assert (made(waiting).code, made(waiting).sizes) == ("start_smaller", (4,))
    assert made(replace(waiting, least=5)).action == "stay"
    assert made(replace(waiting, successor=Successor("8", 8, False))).action == "stay"


def test_what_slurm_refused_holds_nothing_else_up() -> None:
    chained = facts(successor=Successor("8", 9, False), refused={("reshape", "follow_size"): "no"})
    assert made(chained).action == "grow"
    refused = replace(chained, refused={**chained.refused, ("grow", "idle_nodes"): "sbatch says no"})
    assert in_short(made(refused)) == ("stay", "refused")
    assert made(refused).reason == "tried again later: no; sbatch says no"


# -- whatever comes --------------------------------------------------------------------------------------------------

JOINERS = st.lists(
    st.tuples(st.sampled_from(["pending", "running", "leaving", "ending"]), st.floats(0, 300), st.integers(4, 9)),
    max_size=3,
)
WAITING = st.lists(st.builds(Waiting, st.just("99"), st.just("bob"), st.just(("main",)), st.integers(1, 5)), max_size=2)


@given(
    joiners=JOINERS, waiting=WAITING, idle=st.integers(0, 4), least=st.integers(1, 4), most=st.integers(4, 12),
    unit=st.integers(1, 3), ago=st.none() | st.floats(0, 2000), a=st.floats(0, 10), b=st.floats(0.001, 10),
    phase=st.sampled_from(["training", "settling", "between_jobs"]), quota=st.none() | st.integers(0, 9),
)  # fmt: skip
def test_no_facts_make_it_break_a_promise(
    joiners: list[Any], waiting: list[Waiting], idle: int, least: int, most: int, unit: int, ago: float | None,
    a: float, b: float, phase: Any, quota: int | None,
) -> None:  # fmt: skip
    jobs = tuple(joiner(str(20 + i), NODES[at], state=s, since_s=since) for i, (s, since, at) in enumerate(joiners))
    held = frozenset(NODES[:4]) | {name for one in jobs if one.state == "running" for name in one.names}
    given = facts(
        phase=phase, nodes=len(held), held=held, joiners=jobs, least=least, most=max(most, len(held)), unit=unit,
        inventory=cluster(idle, *waiting), last_resize_s=ago, throughput=Throughput(a, b, False), quota_nodes=quota,
    )  # fmt: skip
    decision = made(given)
    assert decision.reason and decision.code
    if decision.action == "grow":
        assert phase == "training" and not waiting and (ago is None or ago >= POLICY.cool_down_s)
        assert given.nodes < decision.nodes <= given.most and decision.nodes % unit == 0
        assert sum(decision.sizes) == decision.nodes - given.nodes <= min(idle, quota if quota is not None else 99)
    if decision.action == "shrink":
        assert set(decision.jobs) <= {one.job for one in jobs if one.state == "running"}
        assert len(held) - len(decision.jobs) >= given.least
    if decision.action == "withdraw":
        assert set(decision.jobs) <= {one.job for one in jobs if one.state == "pending"}


# -- the policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cooldown_s = 1", "no number of the resize policy is called 'cooldown_s'"),
        ("cool_down_s = -1", "cool_down_s is a number of at least 0"),
        ("cool_down_s = inf", "at least 0"),
        ("min_efficiency = 2", "a share from 0 to 1"),
        ("max_joiner_jobs = 1.5", "a whole number"),
        ("reshape_successor = 1", "true or false"),
        ("min_gain = 'a'", "a number of at least 0"),
        ("min_gain", "is not TOML"),
    ],
)
def test_a_wrong_policy_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        resize_policy(path)


def test_single_numbers_of_the_policy_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("settle_s = 5\n")
    assert resize_policy(path) == replace(POLICY, settle_s=5)
