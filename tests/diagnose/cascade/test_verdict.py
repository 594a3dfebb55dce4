"""Which end came first, from tables of ends; and a sample of simulated cascades."""

from __future__ import annotations

from collections import Counter

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.diagnose.cascade.death import Death, death_of
from resilio_hpc.diagnose.cascade.in_ledger import last_origin
from resilio_hpc.diagnose.cascade.verdict import CONFIDENT, judge
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight
from resilio_hpc.launch.workers.output.error_file import describe_exit
from tests.support.diagnose.cascade_score import deaths_of, older_is_right, outcome
from tests.support.diagnose.cascades import FAULTS, cascade

CLOSED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"
FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 88, in step\n'
IN_TORCH = 'Traceback (most recent call last):\n  File "/v/torch/distributed/distributed_c10d.py", line 2810, in wait\n'
BROKEN = "RuntimeError: NCCL error: remote process exited or there was a network error\nNET/IB : Got completion from peer {}<41> with status=12"  # noqa: E501
ADDRESSES = {f"10.0.0.{number}": f"n{number}" for number in range(1, 9)}


def echo(rank: int, node: str, time: float, clock_s: float = 0.01, entered: int = 5) -> Death:
    return death_of(rank, node, "exit", time, clock_s, message=CLOSED, traceback=IN_TORCH, groups=group(rank, entered))


def raised(
    rank: int, node: str, time: float, clock_s: float = 0.01, text: str = "ValueError: no", entered: int = 5
) -> Death:
    return death_of(rank, node, "exit", time, clock_s, message=text, traceback=FRAMES, groups=group(rank, entered))


def group(rank: int, entered: int, size: int = 4, family: str = "gloo") -> tuple[GroupSight, ...]:
    return (GroupSight(9, family, rank, size, entered),)


def test_an_exception_of_the_program_beats_earlier_echoes() -> None:
    verdict = judge([echo(0, "n1", 9.99), raised(2, "n2", 10.0), echo(1, "n1", 10.0)])
    assert (verdict.rank, verdict.node, verdict.primary) == (2, "n2", True)
    assert verdict.confidence >= CONFIDENT
    assert "rank 2 on n2: an exception of the program" in verdict.evidence


def test_two_that_failed_by_themselves_are_ordered_by_time_where_clocks_allow_it() -> None:
    first = judge([raised(0, "n1", 12.0), raised(2, "n2", 10.0, text="KeyError: 1")])
    assert (first.rank, first.primary) == (2, True)
    unclear = judge([raised(0, "n1", 12.0, 1.5), raised(2, "n2", 10.0, 1.5, text="KeyError: 1")])
    assert not unclear.primary
    assert "clocks do not tell" in unclear.evidence


def test_one_node_has_one_clock() -> None:
    verdict = judge([raised(0, "n1", 10.2, 60.0), raised(1, "n1", 10.0, 60.0, text="KeyError: 1")])
    assert (verdict.rank, verdict.primary) == (1, True)


def test_the_same_error_on_several_nodes_is_of_no_rank() -> None:
    verdict = judge([raised(rank, f"n{rank}", 10.0 + rank / 100, 1.0) for rank in range(4)])
    assert not verdict.primary
    assert "the same error on 4 ranks" in verdict.evidence


def test_an_end_without_words_that_others_waited_for_is_the_origin() -> None:
    silent = death_of(3, "n2", "exit", 10.0, 0.5, message="exit code 1", groups=group(3, 4))
    verdict = judge([echo(0, "n1", 9.9, 0.5), silent, echo(1, "n1", 10.1, 0.5), echo(2, "n2", 10.0, 0.5)])
    assert (verdict.rank, verdict.primary) == (3, True)
    assert "others waited for it" in verdict.evidence


def test_a_crash_in_the_teardown_after_an_echo_is_an_echo() -> None:
    crashed = death_of(1, "n1", "signal", 9.0, 0.01, 11, CLOSED, IN_TORCH)
    assert judge([crashed, raised(2, "n2", 10.0)]).rank == 2


def test_an_abort_is_told_from_an_echo_by_its_log() -> None:
    watchdog = "what(): [Rank 1] Process group watchdog thread terminated with exception: Connection closed by peer"
    echoed = death_of(1, "n1", "signal", 9.0, 0.01, 6, "killed by SIGABRT", log=watchdog)
    own = death_of(2, "n2", "signal", 9.5, 0.01, 6, "killed by SIGABRT", log="free(): invalid pointer")
    assert judge([echoed, own]).rank == 2


def test_one_that_ended_long_before_what_looks_like_the_cause_is_not_its_echo() -> None:
    verdict = judge([echo(0, "n1", 10.0), raised(2, "n2", 100.0)])
    assert not verdict.primary
    assert "not known" in verdict.evidence


def test_a_lost_node_is_named_and_one_lost_later_is_not() -> None:
    gone = death_of(-1, "n2", "node_lost", 10.0)
    verdict = judge([echo(0, "n1", 12.0), gone])
    assert (verdict.node, verdict.rank, verdict.primary) == ("n2", -1, True)
    assert judge([raised(0, "n1", 5.0), gone]).rank == 0


def test_the_kernel_counts_more_than_words() -> None:
    said = "killed by SIGKILL: the kernel's out-of-memory killer ended one process in this job"
    killed = death_of(2, "n2", "signal", 10.0, 0.01, 9, said, log=CLOSED)
    verdict = judge([killed, echo(0, "n1", 9.5)])
    assert (verdict.rank, verdict.confidence) == (2, 0.95)
    assert "want of memory" in verdict.evidence
    hint = describe_exit(None, 9)  # says who often sends it
    assert "out-of-memory killer" in hint
    verdict = judge([death_of(2, "n2", "signal", 10.0, 0.01, 9, hint), echo(0, "n1", 9.5)])
    assert verdict.rank == 2 and verdict.confidence < 0.95
    assert "killed by SIGKILL" in verdict.evidence and "memory" not in verdict.evidence


def test_transfers_of_several_ranks_to_one_node_name_it_and_one_transfer_names_no_end() -> None:
    def cut(rank: int, node: str, to: str, at: float) -> Death:
        return death_of(rank, node, "exit", at, 0.01, message=BROKEN.format(to), traceback=IN_TORCH)

    both = [cut(0, "n1", "10.0.0.3", 10.0), cut(1, "n2", "10.0.0.3", 11.0), cut(2, "n3", "10.0.0.1", 30.0)]
    assert (judge(both, ADDRESSES).node, judge(both, ADDRESSES).primary) == ("n3", True)
    one = judge([both[0], both[2]], ADDRESSES)
    assert not one.primary
    assert "n1 and n3" in one.evidence


def test_a_node_that_others_name_and_that_says_nothing_is_named() -> None:
    ends = [death_of(rank, "n1", "exit", 10.0 + rank, 0.01, message=CLOSED, traceback=IN_TORCH) for rank in range(3)]
    verdict = judge(ends, ADDRESSES)
    assert (verdict.node, verdict.rank) == ("n2", -1)


def test_only_echoes_have_no_primary_cause() -> None:
    ends = [death_of(n, f"n{n}", "exit", 10.0, message="Broken pipe", traceback=IN_TORCH) for n in range(3)]
    assert not judge(ends).primary
    assert judge(ends).confidence < CONFIDENT


def test_one_rank_of_a_group_that_said_nothing_is_named_without_being_sure() -> None:
    verdict = judge([echo(rank, f"n{rank + 3}", 10.0) for rank in range(3)])
    assert (verdict.rank, verdict.primary) == (3, True)
    assert verdict.confidence < CONFIDENT


def event(kind: str, time: float, fields: dict[str, object]) -> Event:
    return Event(time, "n1", kind, fields)


def test_a_failure_that_progress_followed_is_not_the_origin_of_a_later_end() -> None:
    killed = event("rank_failed", 10.0, {"rank": 1, "node": "n1", "kind": "signal", "signal": 9, "time": 10.0})
    closed = {"rank": 3, "node": "n2", "kind": "exit", "message": "KeyError: 1", "traceback": FRAMES, "time": 50.0}
    later = event("rank_failed", 50.0, closed)
    for kind in ("recovered", "committed", "first_step"):
        verdict = last_origin([killed, event(kind, 20.0, {}), later])
        assert verdict is not None and verdict.rank == 3
    assert last_origin([killed, event("recovered", 20.0, {})]) is None


def test_the_controllers_own_verdict_in_the_ledger_counts() -> None:
    killed = event(
        "rank_failed", 10.0, {"rank": 1, "node": "n1", "kind": "exit", "message": "exit code 1", "time": 10.0}
    )
    fields = {"node": "n2", "rank": 7, "primary": True, "confidence": 0.6, "evidence": "others waited for it"}
    verdict = last_origin([killed, event("origin", 11.0, fields)])
    assert verdict is not None
    assert (verdict.rank, verdict.evidence) == (7, "others waited for it")


@pytest.mark.parametrize("size", [8, 64])
def test_simulated_cascades(size: int) -> None:
    """Few of each fault; benchmarks/cascades.py judges thousands, up to 1,024 ranks."""
    found, older = Counter[str](), 0
    for fault in FAULTS:
        for seed in range(1000, 1000 + (24 if size == 8 else 6)):
            case = cascade(fault, size, seed)
            if case.reports:
                found[outcome(case, deaths_of(case))] += 1
                older += older_is_right(case)
    cases = sum(found.values())
    assert found["right"] >= 0.94 * cases, found
    assert found["wrong, and sure of it"] <= 0.01 * cases
    assert found["right"] > 1.05 * older
