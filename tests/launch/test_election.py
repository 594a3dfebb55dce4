"""Elections, one node at a time: who stands, who wins, with which epoch."""

from __future__ import annotations

from resilio_hpc.launch.consensus.follower import Succession
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import next_membership
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList
from resilio_hpc.launch.protocol.vote import EpochRecord, Term
from tests.support.launch.lone_agent import LIMIT_S, Ports, agent, follower, leaderless, words

# -- standing ------------------------------------------------------------------------------------------------------


def elected(one: Succession, ports: Ports, *others: str) -> Term | None:
    """``others`` call, and vote when they are asked."""
    one.lose(2.0)
    for node in others:
        one.peer_said(leaderless(node), 2.3)
    for done in ports.take():
        if isinstance(done, tuple) and isinstance(done[1], m.RequestVote):
            one.peer_said(m.Vote(done[0], done[1].epoch, 1.0), 2.4)
    return next((done for done in ports.take() if isinstance(done, Term)), None)


def test_with_the_votes_of_a_quorum_it_leads_and_has_promised_that_to_itself() -> None:
    one, ports = follower("b", "a")
    term = elected(one, ports, "c")
    assert term is not None
    assert (term.epoch, term.first, term.witnessed) == (2, False, False)
    assert term.supporters == {"b", "c"}
    assert (ports.kept[-1].promised, ports.kept[-1].promised_to) == (2, "b")
    assert one.following == EpochRecord(2, "b", "b:1", "job")


def test_who_has_won_says_so_before_it_has_heard_of_itself() -> None:
    """Its own connection to itself waits behind thousands of handshakes."""
    one, ports = follower("b", "a", names=("a", "b", "c", "d", "e"))
    term = elected(one, ports, "c", "d")
    assert term is not None
    assert not one.in_contact
    for late in (leaderless("e"), m.Vote("e", term.epoch, 1.0)):
        one.peer_said(late, 2.5)
        assert words(ports) == [("e", m.Redirect(term.epoch, "b", "b:1"))]
    one.tick(2.5 + LIMIT_S)
    assert words(ports) == []  # nor does it stand again
    one.stepped_down(term.epoch, 2.6, 2.6)
    one.peer_said(leaderless("e"), 2.7)
    assert words(ports) == [("e", m.Candidate(term.epoch))]


def test_nobody_stands_who_has_a_controller_or_is_alone() -> None:
    one, ports = follower("b", "a")
    one.peer_said(leaderless("c"), 1.5)
    assert isinstance(ports.take()[0][1], m.Redirect)  # type: ignore[index]
    one.lose(2.0)
    for tick in range(40):
        one.tick(2.3 + tick / 10)
    assert not any(isinstance(done, Term) for done in ports.take())
    assert ports.kept[-1].promised == 1


def test_orphans_of_long_ago_do_not_count() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(leaderless("c"), 2.1)
    one.tick(3.2)
    assert not any(isinstance(done, tuple) and isinstance(done[1], m.RequestVote) for done in ports.take())


def test_nobody_stands_once_a_later_job_of_the_run_has_begun() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.scanned(EpochRecord(1000, "", "127.0.0.1:9", "next-begins"), None, 2.1)
    one.peer_said(leaderless("c"), 2.3)
    for tick in range(40):
        one.tick(2.4 + tick / 10)
        one.peer_said(leaderless("c"), 2.4 + tick / 10)
    one.answered(m.RequestVote(1002, "c", (1, 1)), 7.0)
    one.answered(m.Welcome(1001, "c", "c:1"), 7.0)
    one.scanned(EpochRecord(1001, "c", "c:1", "job"), 1, 7.0)  # of one that knows nothing of it
    assert one.state.vote_record.promised == 1
    assert not any(isinstance(done, Term | m.Vote) for done in ports.take())
    assert one.following == EpochRecord(1, "a", "a:1", "job")


def test_nobody_claims_once_a_later_job_of_the_run_has_begun() -> None:
    begins = EpochRecord(1000, "", "127.0.0.1:9", "next-begins")
    one, ports = agent("b")
    for now in (0.0, 1.5, 3.0):
        one.tick(now)
        one.scanned(begins if now else None, None, now)
    assert ports.take() == ["scan"] * 3
    own, ports = agent("a", begins=1000)  # of the job that begins
    own.tick(0.0)
    own.scanned(begins, None, 0.0)
    assert ports.take() == ["scan", "claim 1001"]


def test_exactly_half_needs_the_witness_and_waits_a_moment_for_one_more() -> None:
    one, ports = follower("b", "a", names=("a", "b"))
    one.lose(2.0)
    one.tick(2.3)
    assert words(ports) == []
    one.tick(2.6)
    one.tick(3.2)
    assert words(ports) == ["witness 0.0"]
    one.witness_claimed("0.0", "b", 3.3)
    term, follow = ports.take()
    assert isinstance(term, Term) and term.witnessed
    assert follow == "follow b 2"


def test_the_half_without_the_witness_does_not_lead() -> None:
    one, ports = follower("b", "a", names=("a", "b"))
    one.lose(2.0)
    one.tick(2.6)
    one.tick(3.2)
    one.witness_claimed("0.0", "a", 3.3)
    assert not any(isinstance(done, Term) for done in ports.take())
    assert not one.in_contact


def test_a_witness_of_each_halved_group_is_needed_and_counts_with_its_holder() -> None:
    one, ports = follower("b", "a", names=("a", "b", "c", "d"))
    one.state.update_voters(
        next_membership(one.state.membership, 1, NodeList.of([NodeEntry(x, x, 1) for x in "ab"]), settled=True)
    )
    one.lose(2.0)
    one.peer_said(leaderless("c"), 2.3)
    one.tick(2.6)
    for done in ports.take():
        if isinstance(done, tuple) and isinstance(done[1], m.RequestVote):
            one.peer_said(m.Vote("c", done[1].epoch, 1.0), 3.2)
    assert words(ports) == ["witness 0.0"]
    one.witness_claimed("0.0", "c", 3.3)  # it created the file when it stood itself, and has voted for us now
    assert words(ports) == ["witness 1.2"]
    one.witness_claimed("1.2", "b", 3.4)
    term = ports.take()[0]
    assert isinstance(term, Term)
    assert (term.witnessed, term.supporters) == (True, {"b", "c"})


def test_a_candidate_counts_votes_of_its_own_epoch_only() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(leaderless("c"), 2.3)
    one.peer_said(m.Vote("c", 1, 1.0), 2.4)
    one.peer_said(m.Vote("c", 4, 1.0), 2.4)
    assert not any(isinstance(done, Term) for done in ports.take())
    one.peer_said(m.Vote("c", 2, 1.0), 2.5)
    assert any(isinstance(done, Term) for done in ports.take())


def test_elected_epochs_are_even_and_beyond_what_any_supporter_knows() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(leaderless("c", newest=7), 2.3)
    canvass = [done[1] for done in ports.take() if isinstance(done, tuple) and isinstance(done[1], m.RequestVote)]
    assert [asked.epoch for asked in canvass] == [8]


def test_a_controller_that_somebody_may_not_follow_any_more_steps_down() -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.claimed(1, True, 0.0)
    one.heard(1, 0.1)
    ports.take()
    one.peer_said(m.NoLeader("c", 6, one.state.membership, 1.0), 1.5)
    assert ports.take() == ["step down: a newer epoch was promised"]
