"""What an agent makes of its own ranks' words and ends."""

from __future__ import annotations

import pytest

from resilio_hpc.core.rank_link import (
    Attach,
    Finished,
    Restored,
    RestoreFailed,
    Section,
    SnapshotTaken,
    StepDone,
    StopAck,
    StopAt,
    StopConfirmed,
    Stopped,
)  # fmt: skip
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LINGERS_S, LocalRound

MEMBER = m.Member("n2", 1, "n2-ib", 2, 2)
STATE = m.RoundState(3, 7, (m.Member("n1", 0, "n1-ib", 2, 0), MEMBER), 1, 1, ())
NO_ERROR = ("", "")


def local_round(attached: bool = True) -> LocalRound:
    local = LocalRound("n2", STATE, MEMBER, None)
    if attached:
        for index in local.ranks:
            local.said(index, Attach(2 + index, index, 7, 100 + index), 0.0)
    return local


def failure(local: LocalRound, index: int, code: int | None, signal: int | None = None) -> m.RankFailure:
    (message,) = local.exited(index, code, signal, 50.0, NO_ERROR)
    assert isinstance(message, m.RankFailed)
    assert (message.round, message.failure.rank) == (7, 2 + index)
    return message.failure


def test_the_first_step_is_told_when_the_last_rank_made_it() -> None:
    local = local_round()
    for index in local.ranks:
        local.said(index, Restored(40, "memory", 0.1), 0.0)
    assert local.said(0, StepDone(41, 10.0), 0.0) == []
    assert local.said(1, StepDone(41, 10.5), 0.0) == [m.FirstStep("n2", 3, 7, 41, 10.5, 40, (("memory", 2),), 0.1)]
    assert local.said(1, StepDone(42, 11.0), 0.0) == []


def test_the_first_step_tells_from_where_how_many_ranks_were_restored() -> None:
    local = local_round()
    for index, source in enumerate(("committed", "no tier")):
        local.said(index, Restored(40, source, 0.1), 0.0)
    found = [message for index in (0, 1) for message in local.said(index, StepDone(41, 10.0), 0.0)]
    assert found == [m.FirstStep("n2", 3, 7, 41, 10.0, 40, (("committed", 1),), 0.1)]


def test_the_step_time_is_that_of_the_last_steps_and_not_of_the_whole_run() -> None:
    local = local_round()
    for index in local.ranks:
        local.said(index, StepDone(1, 10.0), 0.0)
        local.said(index, StepDone(2, 1010.0), 0.0)
        local.said(index, StepDone(6, 1012.0), 0.0)
    assert local.step_time == 0.5
    assert (local.step, local.furthest) == (6, 6)


def test_a_snapshot_is_whole_when_every_rank_took_it() -> None:
    local = local_round()
    assert local.said(0, SnapshotTaken(10, "a", 100, 0.1), 0.0) == []
    assert local.said(1, SnapshotTaken(10, "b", 50, 0.3), 0.0) == [m.SnapshotWhole("n2", 3, 7, 10, 150, 0.3)]


def test_how_a_rank_may_end() -> None:
    assert failure(local_round(), 0, None, 9).kind == "signal"
    assert failure(local_round(), 1, 3).kind == "exit"
    early = failure(local_round(), 0, 0)
    assert (early.kind, "before training was finished" in early.message) == ("early_exit", True)
    plain = local_round(attached=False)
    assert plain.exited(0, 0, None, 50.0, NO_ERROR) == []
    assert plain.exited(1, 0, None, 50.0, NO_ERROR) == [m.RanksDone("n2", 3, 7, False, -1, -1, attached=False)]


def test_a_rank_that_never_attached_may_end_when_those_that_did_have_finished() -> None:
    """Rank 0 alone attaches, to show the run's steps."""
    for finished in (False, True):
        local = local_round(attached=False)
        local.said(0, Attach(2, 0, 7, 100), 0.0)
        if finished:
            local.said(0, Finished(12), 0.0)
        answers = local.exited(1, 0, None, 50.0, NO_ERROR)
        assert [type(answer) for answer in answers] == ([] if finished else [m.RankFailed])


def test_a_copy_that_cannot_be_restored_is_named() -> None:
    local = local_round()
    local.said(0, RestoreFailed(30, "memory", "checksum of layer.0"), 0.0)
    told = failure(local, 0, 98)
    assert (told.kind, told.bad_copy) == ("restore_failed", m.RestorePoint(Tier.MEMORY, 30))
    odd = local_round()
    odd.said(0, RestoreFailed(30, "me mo:ry", "x"), 0.0)
    assert failure(odd, 0, 98).bad_copy == m.RestorePoint("me mo:ry", 30)


def test_ranks_that_stopped_or_finished_may_exit() -> None:
    for word, stopped in ((Stopped(12), True), (Finished(12), False)):
        local = local_round()
        for index in local.ranks:
            local.said(index, word, 0.0)
        assert local.exited(0, 0, None, 50.0, NO_ERROR) == []
        assert local.exited(1, 0, None, 50.0, NO_ERROR) == [m.RanksDone("n2", 3, 7, stopped, 12, -1)]


def test_a_rank_that_finished_and_does_not_end_is_told_once() -> None:
    local = local_round()
    local.said(0, Finished(12), 100.0)
    local.said(1, Finished(12), 150.0)
    assert local.lingering(100.0 + LINGERS_S) == []
    assert [rank.rank for rank in local.lingering(101.0 + LINGERS_S)] == [2]
    local.exited(1, 0, None, 50.0, NO_ERROR)
    assert local.lingering(1000.0) == []


def test_ranks_told_to_end_may_end_as_they_like_if_they_know_no_steps() -> None:
    local = local_round(attached=False)
    local.terminating = True
    assert local.exited(0, None, 15, 50.0, NO_ERROR) == []
    assert local.exited(1, 1, None, 50.0, NO_ERROR) == [m.RanksDone("n2", 3, 7, True, -1, -1, attached=False)]


def test_the_nodes_answer_to_a_stop_waits_for_all_its_ranks() -> None:
    local = local_round()
    assert local.propose_stop(20) == []
    assert local.said(0, StopAck(20, True, 17), 0.0) == []
    assert local.said(1, StopAck(18, True, 17), 0.0) == []  # of an earlier proposal
    answer = m.StopAnswer("n2", 3, 7, 20, True, 18, 2)
    assert local.said(1, StopAck(20, True, 18), 0.0) == [answer]
    assert local.propose_stop(20) == []  # asked again, and so is each rank
    assert local.said(0, StopAck(20, True, 18), 0.0) == []
    assert local.said(1, StopAck(20, True, 18), 0.0) == [answer]
    assert local.propose_stop(25) == []
    local.said(0, StopAck(25, True, 20), 0.0)
    assert local.said(1, StopAck(25, False, 26), 0.0) == [m.StopAnswer("n2", 3, 7, 25, False, 26, 2)]


def test_without_attached_ranks_the_answer_comes_at_once() -> None:
    assert local_round(attached=False).propose_stop(5) == [m.StopAnswer("n2", 3, 7, 5, True, -1, 0)]


def test_who_attaches_late_is_told_of_the_stop() -> None:
    local = local_round(attached=False)
    assert local.pending_stop() == []
    local.propose_stop(9)
    assert local.pending_stop() == [StopAt(9)]
    local.stop_confirmed = True
    assert local.pending_stop() == [StopAt(9), StopConfirmed(9)]


@pytest.mark.parametrize("name", ["évaluation", "评估", "a\nb", "x" * 500, "\x1b[31m"])
def test_a_section_may_have_any_name_and_its_heartbeat_is_taken(name: str) -> None:
    local = local_round()
    local.said(0, Section(name), 0.0)
    assert local.section
    beat = m.Heartbeat("n1", "i", 1, 0.0, 0, section=local.section)
    assert m.to_controller.decode(m.to_controller.encode(beat)) == beat
    local.said(0, Section(""), 1.0)
    assert local.section == ""
