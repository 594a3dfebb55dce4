"""One agent's view of an election, call by call: whom it contacts, when it stands, to whom it gives its vote."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.launch.consensus.follower import Succession
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, Membership, first_membership
from resilio_hpc.launch.protocol.vote import EpochRecord, Term
from tests.support.launch.lone_agent import ABC, LIMIT_S, agent, follower, leaderless, with_voters, words

# -- the first controller ------------------------------------------------------------------------------------------


def test_the_first_node_claims_the_first_epoch_by_its_file_and_leads_without_votes() -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.scanned(None, None, 0.0)
    one.claimed(1, True, 0.0)
    scan, claim, term, follow = ports.take()
    assert (scan, claim, follow) == ("scan", "claim 1", "follow a 1")
    assert isinstance(term, Term)
    assert (term.epoch, term.first, term.witnessed, term.supporters) == (1, True, False, frozenset())
    assert ports.kept[-1].promised == 1


def test_the_others_wait_their_turn_and_follow_what_they_find() -> None:
    one, ports = agent("b")
    one.tick(0.0)
    one.scanned(None, None, 0.5)
    assert ports.take() == ["scan"]
    one.scanned(EpochRecord(1, "a", "a:1", "job"), 1, 0.6)
    assert ports.take() == ["follow a 1"]


def test_the_second_node_claims_when_the_first_does_not() -> None:
    one, ports = agent("b")
    one.tick(0.0)
    one.scanned(None, None, 1.1)
    assert ports.take() == ["scan", "claim 1"]
    one.claimed(1, False, 1.2)  # it did after all
    assert ports.take() == []


@pytest.mark.parametrize(
    ("record", "begins", "claimed"),
    [
        (None, 0, 1),
        (EpochRecord(1000, "", "127.0.0.1:9", "job-begins"), 1000, 1001),
        (EpochRecord(998, "b", "b:1", "job0"), 1000, 1001),  # a directory that shows yesterday's files
        (EpochRecord(999, "b", "b:1", "job"), 1000, 1001),  # an earlier launch of the same job
    ],
)
def test_claimed_epochs_are_odd_and_count_on_from_where_the_part_begins(
    record: EpochRecord | None, begins: int, claimed: int
) -> None:
    one, ports = agent("a", begins=begins)
    one.tick(0.0)
    one.scanned(record, 3, 0.0)
    assert ports.take() == ["scan", f"claim {claimed}"]


@pytest.mark.parametrize("with_voters", [False, True])
def test_whatever_another_job_takes_after_our_part_began_ends_it_also_at_the_first_look(with_voters: bool) -> None:
    one, ports = follower("b", of="a") if with_voters else agent("b")
    one.lose(1.0)
    one.tick(10.0)
    ports.take()
    one.scanned(EpochRecord(1000, "", "127.0.0.1:9", "next-begins"), None, 10.0)
    one.tick(100.0)
    one.scanned(EpochRecord(1000, "", "127.0.0.1:9", "next-begins"), None, 100.0)
    assert one.state.superseded
    assert not any(what.startswith(("claim", "follow")) for what in map(str, ports.take()))


def test_an_agent_does_not_follow_its_dead_predecessor() -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.scanned(EpochRecord(3, "a", "a:1", "job"), 3, 0.0)
    assert ports.take() == ["scan", "claim 5"]


# -- losing it -----------------------------------------------------------------------------------------------------


def test_an_agent_is_content_while_its_controller_speaks() -> None:
    one, ports = follower("b", "a")
    one.tick(1.0 + LIMIT_S)
    assert ports.take() == []
    one.tick(1.01 + LIMIT_S)
    assert "contact c at c:1" not in ports.take(), "b is the first successor itself"
    assert not one.in_contact


def test_a_closed_connection_may_come_back_before_anybody_is_courted() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.tick(2.2)
    assert words(ports) == []
    one.heard(1, 2.24)
    assert one.in_contact
    one.lose(3.0)
    one.tick(3.24)
    assert words(ports) == []
    one.tick(3.26)
    assert words(ports) == ["contact b at b:1", m.NoLeader("c", 1, one.state.membership, 3.26 - 2.24)]


def test_an_orphan_courts_the_heirs_in_turn_and_whom_it_lost_last() -> None:
    one, ports = follower("d", "a", names=("a", "b", "c", "d"))
    one.lose(2.0)
    contacted = []
    for tick in range(58):  # its own turn, too
        one.tick(2.3 + tick / 10)
        contacted += [done for done in ports.take() if isinstance(done, str) and done.startswith("contact")]
    assert contacted == ["contact b at b:1", "contact c at c:1", "contact a at a:1"]


def test_among_thousands_a_call_or_a_canvass_without_an_answer_is_not_repeated_at_once() -> None:
    names = tuple(f"n{number}" for number in range(2000))
    one, ports = follower("n5", "n0", names)
    one.lose(2.0)
    calls = []
    for tick in range(40):
        one.tick(2.3 + tick / 10)
        calls += [2.3 + tick / 10 for done in words(ports) if isinstance(done, m.NoLeader)]
    assert len(calls) == 2, calls  # every other second: two thousand handshakes take up to four

    successor, ports = follower("n1", "n0", names)
    successor.lose(2.0)
    call = leaderless("n2", names=names)
    for number in range(2, 1002):
        successor.peer_said(msgspec.structs.replace(call, node=f"n{number}"), 2.3)
    successor.peer_said(call, 2.4)
    canvassed = [done[0] for done in words(ports) if isinstance(done, tuple) and isinstance(done[1], m.RequestVote)]
    assert sorted(set(canvassed)) == sorted(canvassed)
    assert len(canvassed) >= 1000
    successor.peer_said(call, 4.4)
    assert [done[0] for done in words(ports) if isinstance(done, tuple)] == ["n2"]


def test_who_has_a_controller_points_to_it() -> None:
    one, ports = follower("b", "a")
    one.peer_said(leaderless("c"), 1.5)
    assert ports.take() == [("c", m.Redirect(1, "a", "a:1"))]


def test_a_redirect_is_followed_also_to_the_one_that_was_lost() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0, closed=False)
    one.tick(2.1)
    one.answered(m.Redirect(1, "a", "a:1"), 2.5)
    assert words(ports)[-1:] == ["follow a 1"]


def test_each_call_is_answered_but_nobody_connects_twice() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.tick(2.3)
    assert "contact b at b:1" in words(ports)
    one.answered(m.Redirect(2, "b", "b:1"), 2.4)
    assert words(ports) == ["follow b 2 connected"]
    one.answered(m.Redirect(2, "b", "b:1"), 2.4)
    assert words(ports) == []


def test_who_is_pointed_back_to_a_process_that_is_gone_does_not_wait_long_for_it() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.tick(2.3)
    one.answered(m.Redirect(1, "a", "a:1"), 2.4)  # b has not noticed yet
    one.tick(3.3)
    assert words(ports)[-1:] == ["follow a 1"]
    one.tick(3.5)
    assert "contact b at b:1" in words(ports)


# -- voting --------------------------------------------------------------------------------------------------------


def test_a_vote_is_kept_before_it_is_said() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    ports.to_controller = lambda message: ports.done.append((message, ports.kept[-1].promised))  # type: ignore[method-assign]
    one.answered(m.RequestVote(2, "b", (1, 1)), 2.5)
    assert words(ports) == [(m.Vote("c", 2, 1.5), 2)]


def test_one_vote_per_epoch_said_again_to_the_same_only() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    for _ in range(2):
        one.answered(m.RequestVote(2, "b", (1, 1)), 2.5)
    assert words(ports) == [m.Vote("c", 2, 1.5)] * 2
    one.answered(m.RequestVote(2, "x", (1, 1)), 2.6)
    assert not any(isinstance(done, m.Vote) for done in ports.take())


def test_no_vote_for_who_knows_older_voters() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.answered(m.RequestVote(2, "b", (1, 0)), 2.5)
    (said,) = words(ports)
    assert isinstance(said, m.NoLeader)  # so that it learns of ours
    assert said.membership == one.state.membership


def test_no_vote_while_the_controller_lives() -> None:
    one, ports = follower("c", "a")
    one.answered(m.RequestVote(2, "b", (1, 1)), 2.5)
    assert ports.take() == []
    assert one.state.vote_record.promised == 1


def test_whom_an_agent_followed_its_successor_does_not_forget() -> None:
    """Not even before it knew voters: the controller may have counted on it."""
    one, ports = agent("c")
    one.tick(0.0)
    one.scanned(EpochRecord(5, "a", "a:1", "job"), 1, 0.0)
    assert ports.kept == []  # it may be long dead
    one.heard(5, 0.1)
    assert (ports.kept[-1].promised, ports.kept[-1].promised_to) == (5, "a")
    another = Succession("c", "job", "c:1", ports.kept[-1], LIMIT_S, ports, ports)
    another.tick(20.0)
    ports.take()
    another.answered(m.RequestVote(4, "b", (0, 0)), 20.0)
    assert not any(isinstance(done, m.Vote) for done in ports.take())
    assert another.state.vote_record.promised == 5


def test_who_has_lost_the_tie_claims_no_more_until_somebody_else_has_led() -> None:
    one, ports = agent("a", first_membership(("a", "b")))
    one.tick(0.0)
    one.scanned(None, None, 0.0)
    one.claimed(1, True, 0.1)
    one.heard(1, 0.2)
    one.stepped_down(1, NEVER, 6.0, outvoted=True)
    ports.take()
    for second in range(60):
        one.tick(7.0 + second)
        one.scanned(EpochRecord(1, "a", "a:1", "job"), None, 7.0 + second)
    assert words(ports) == []
    one.scanned(EpochRecord(3, "b", "b:1", "job"), 1, 70.0)
    one.heard(3, 70.1)
    one.lose(71.0)
    one.tick(71.0)
    one.scanned(EpochRecord(3, "b", "b:1", "job"), None, 71.1)
    assert "claim 5" in words(ports)


def test_nobody_older_than_the_promise_is_followed() -> None:
    one, ports = agent("c", promised=4)
    one.tick(0.0)
    one.scanned(EpochRecord(3, "a", "a:1", "job"), 1, 0.1)
    one.answered(m.Welcome(3, "a", "a:1"), 0.2)
    assert not any(isinstance(done, str) and done.startswith("follow") for done in ports.take())
    one.answered(m.Welcome(4, "z", "z:1"), 0.3)
    assert words(ports) == ["follow z 4"]


def test_a_membership_is_kept_if_it_is_newer() -> None:
    one, ports = agent("c")
    newer = with_voters("a", "c")
    assert one.state.update_voters(newer)
    assert one.state.update_voters(newer)
    assert not one.state.update_voters(msgspec.structs.replace(newer, number=0))
    assert [vote_record.membership for vote_record in ports.kept] == [newer]


# -- a claim by a node that does not know of later voters --------------------------------------------------------------


def test_a_claimed_epoch_is_followed_only_once_its_controller_knows_as_much() -> None:
    """It may count voters who have lost their votes, and us as one of them."""
    one, ports = follower("b", "a")
    one.lose(2.0)
    claim = EpochRecord(3, "z", "z:1", "job")
    one.scanned(claim, 0, 2.1)
    assert ports.take()[-2:] == ["contact z at z:1", m.NoLeader("b", 1, one.state.membership, 1.1)]
    assert one.following is not None
    assert one.following.epoch == 1
    ports.take()
    one.scanned(claim, 0, 2.2)  # it was told, and its pulse stands still
    assert ports.take() == []
    one.answered(m.Redirect(3, "z", "z:1"), 2.3)
    assert one.following == claim


def test_nobody_else_can_vouch_for_a_claimed_epoch() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.tick(2.3)
    assert "contact b at b:1" in words(ports)
    one.answered(m.Redirect(3, "z", "z:1"), 2.4)
    assert words(ports)[0] == "contact z at z:1"
    assert one.following is not None
    assert one.following.epoch == 1


def test_who_claimed_an_epoch_gives_it_up_when_it_hears_of_enrolled_voters() -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.scanned(None, None, 0.0)
    one.claimed(1, True, 0.1)
    one.heard(1, 0.2)
    ports.take()
    one.peer_said(leaderless("c", newest=0), 0.3)
    assert ports.take() == ["step down: others know of later voters"]
    assert one.state.membership == with_voters(*ABC)
    two, ports = follower("b", "a", names=("b", "c"))
    two.peer_said(m.NoLeader("c", 0, Membership(0, 0), 1.0), 1.5)
    assert isinstance(ports.take()[0][1], m.Redirect)  # type: ignore[index]
