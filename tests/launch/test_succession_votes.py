"""One agent's view of an election, call by call: whom it courts, when it stands, to whom it gives its vote."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.ballot import Ballot, EpochRecord, Term
from resilio_hpc.launch.quorum import Membership, first_membership
from resilio_hpc.launch.roster import Entry, Roster
from resilio_hpc.launch.succession import Succession

LIMIT_S = 5.0
ABC = ("a", "b", "c")


def enrolled(*names: str) -> Membership:
    return Membership(1, 1, Roster.of([Entry(name, name, 1) for name in names]))


@dataclass
class Ports:
    """What the succession wants done, in words; anything else is an AttributeError."""

    now: float = 0.0
    done: list[object] = field(default_factory=list)
    kept: list[Ballot] = field(default_factory=list)

    def take(self) -> list[object]:
        done, self.done = self.done, []
        return done

    def monotonic(self) -> float:
        return self.now

    def to_controller(self, message: m.ToController) -> None:
        self.done.append(message)

    def to_orphan(self, node: str, message: m.ToAgent) -> None:
        self.done.append((node, message))

    def court(self, node: str, endpoint: str) -> None:
        self.done.append(f"court {node} at {endpoint}")

    def scan_epochs(self) -> None:
        self.done.append("scan")

    def claim_epoch(self, epoch: int) -> None:
        self.done.append(f"claim {epoch}")

    def claim_witness(self, epoch: int) -> None:
        self.done.append(f"witness {epoch}")

    def abandon(self, epoch: int, reason: str) -> None:
        raise AssertionError("the succession never gives a job up")

    def keep_ballot(self, ballot: Ballot) -> None:
        self.kept.append(ballot)

    def follow(self, record: EpochRecord, connected: bool) -> None:
        self.done.append(f"follow {record.node} {record.epoch}{' connected' if connected else ''}")

    def lead(self, term: Term) -> None:
        self.done.append(term)

    def step_down(self) -> None:
        self.done.append("step down")


def agent(node: str, membership: Membership | None = None, promised: int = 0) -> tuple[Succession, Ports]:
    ports = Ports()
    ballot = Ballot(membership or first_membership(ABC), promised, "z" if promised else "")
    return Succession(node, "job", f"{node}:1", ballot, LIMIT_S, ports, ports), ports


def follower(node: str, of: str, names: tuple[str, ...] = ABC) -> tuple[Succession, Ports]:
    """It follows the controller of epoch 1, which has enrolled everybody."""
    one, ports = agent(node)
    one.tick(0.0)
    one.scanned(EpochRecord(1, of, f"{of}:1", "job"), 1, 0.0)
    one.heard(1, 0.1)
    one.enrol(enrolled(*names))
    ports.now = 1.0
    one.heard(1, 1.0)
    ports.take()
    return one, ports


def orphan(node: str, newest: int = 1, names: tuple[str, ...] = ABC) -> m.Orphan:
    return m.Orphan(node, newest, enrolled(*names), 1.0)


def words(ports: Ports) -> list[object]:
    """What was done, without looks at the run directory."""
    return [done for done in ports.take() if done != "scan"]


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


@pytest.mark.parametrize(("newest", "claimed"), [(7, 9), (8, 9), (0, 1)])
def test_claimed_epochs_are_odd_count_on_from_an_earlier_job_and_do_not_follow_it(newest: int, claimed: int) -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.scanned(EpochRecord(newest, "b", "b:1", "job0") if newest else None, 3, 0.0)
    assert ports.take() == ["scan", f"claim {claimed}"]


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
    assert "court c at c:1" not in ports.take(), "b is the first heir itself"
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
    assert words(ports) == ["court b at b:1", m.Orphan("c", 1, one.membership, 3.26 - 2.24)]


def test_an_orphan_courts_the_heirs_in_turn_and_whom_it_lost_last() -> None:
    one, ports = follower("d", "a", names=("a", "b", "c", "d"))
    one.lose(2.0)
    courted = []
    for tick in range(58):  # its own turn, too
        one.tick(2.3 + tick / 10)
        courted += [done for done in ports.take() if isinstance(done, str) and done.startswith("court")]
    assert courted == ["court b at b:1", "court c at c:1", "court a at a:1"]


def test_among_thousands_a_call_or_a_canvass_without_an_answer_is_not_repeated_at_once() -> None:
    names = tuple(f"n{number}" for number in range(2000))
    one, ports = follower("n5", "n0", names)
    one.lose(2.0)
    calls = []
    for tick in range(40):
        one.tick(2.3 + tick / 10)
        calls += [2.3 + tick / 10 for done in words(ports) if isinstance(done, m.Orphan)]
    assert len(calls) == 2, calls  # every other second: two thousand handshakes take up to four

    heir, ports = follower("n1", "n0", names)
    heir.lose(2.0)
    call = orphan("n2", names=names)
    for number in range(2, 1002):
        heir.peer_said(msgspec.structs.replace(call, node=f"n{number}"), 2.3)
    heir.peer_said(call, 2.4)
    canvassed = [done[0] for done in words(ports) if isinstance(done, tuple) and isinstance(done[1], m.Canvass)]
    assert sorted(set(canvassed)) == sorted(canvassed)
    assert len(canvassed) >= 1000
    heir.peer_said(call, 4.4)
    assert [done[0] for done in words(ports) if isinstance(done, tuple)] == ["n2"]


def test_who_has_a_controller_points_to_it() -> None:
    one, ports = follower("b", "a")
    one.peer_said(orphan("c"), 1.5)
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
    assert "court b at b:1" in words(ports)
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
    assert "court b at b:1" in words(ports)


# -- standing ------------------------------------------------------------------------------------------------------


def elected(one: Succession, ports: Ports, *others: str) -> Term | None:
    """``others`` call, and vote when they are asked."""
    one.lose(2.0)
    for node in others:
        one.peer_said(orphan(node), 2.3)
    for done in ports.take():
        if isinstance(done, tuple) and isinstance(done[1], m.Canvass):
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
    for late in (orphan("e"), m.Vote("e", term.epoch, 1.0)):
        one.peer_said(late, 2.5)
        assert words(ports) == [("e", m.Redirect(term.epoch, "b", "b:1"))]
    one.tick(2.5 + LIMIT_S)
    assert words(ports) == []  # nor does it stand again
    one.stepped_down(term.epoch, 2.6, 2.6)
    one.peer_said(orphan("e"), 2.7)
    assert words(ports) == [("e", m.Standing(term.epoch))]


def test_nobody_stands_who_has_a_controller_or_is_alone() -> None:
    one, ports = follower("b", "a")
    one.peer_said(orphan("c"), 1.5)
    assert isinstance(ports.take()[0][1], m.Redirect)  # type: ignore[index]
    one.lose(2.0)
    for tick in range(40):
        one.tick(2.3 + tick / 10)
    assert not any(isinstance(done, Term) for done in ports.take())
    assert ports.kept[-1].promised == 0


def test_orphans_of_long_ago_do_not_count() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(orphan("c"), 2.1)
    one.tick(3.2)
    assert not any(isinstance(done, tuple) and isinstance(done[1], m.Canvass) for done in ports.take())


def test_nobody_stands_once_a_later_job_of_the_run_has_begun() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.scanned(EpochRecord(1000, "", "127.0.0.1:9", "next-begins"), None, 2.1)
    one.peer_said(orphan("c"), 2.3)
    for tick in range(40):
        one.tick(2.4 + tick / 10)
        one.peer_said(orphan("c"), 2.4 + tick / 10)
    one.answered(m.Canvass(1002, "c", (1, 1)), 7.0)
    one.answered(m.Welcome(1001, "c", "c:1"), 7.0)
    one.scanned(EpochRecord(1001, "c", "c:1", "job"), 1, 7.0)  # of one that knows nothing of it
    assert one.ballot.promised == 0
    assert not any(isinstance(done, Term | m.Vote) for done in ports.take())
    assert one.following == EpochRecord(1, "a", "a:1", "job")


def test_nobody_claims_once_a_later_job_of_the_run_has_begun() -> None:
    begins = EpochRecord(1000, "", "127.0.0.1:9", "next-begins")
    one, ports = agent("b")
    for now in (0.0, 1.5, 3.0):
        one.tick(now)
        one.scanned(begins if now else None, None, now)
    assert ports.take() == ["scan"] * 3
    own, ports = agent("a")  # of the job that begins
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
    assert words(ports) == ["witness 1"]
    one.witness_claimed(1, True, 3.3)
    term, follow = ports.take()
    assert isinstance(term, Term) and term.witnessed
    assert follow == "follow b 2"


def test_the_half_without_the_witness_does_not_lead() -> None:
    one, ports = follower("b", "a", names=("a", "b"))
    one.lose(2.0)
    one.tick(2.6)
    one.tick(3.2)
    one.witness_claimed(1, False, 3.3)
    assert not any(isinstance(done, Term) for done in ports.take())
    assert not one.in_contact


def test_a_candidate_counts_votes_of_its_own_epoch_only() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(orphan("c"), 2.3)
    one.peer_said(m.Vote("c", 1, 1.0), 2.4)
    one.peer_said(m.Vote("c", 4, 1.0), 2.4)
    assert not any(isinstance(done, Term) for done in ports.take())
    one.peer_said(m.Vote("c", 2, 1.0), 2.5)
    assert any(isinstance(done, Term) for done in ports.take())


def test_elected_epochs_are_even_and_beyond_what_any_supporter_knows() -> None:
    one, ports = follower("b", "a")
    one.lose(2.0)
    one.peer_said(orphan("c", newest=7), 2.3)
    canvass = [done[1] for done in ports.take() if isinstance(done, tuple) and isinstance(done[1], m.Canvass)]
    assert [asked.epoch for asked in canvass] == [8]


def test_a_controller_that_somebody_may_not_follow_any_more_steps_down() -> None:
    one, ports = agent("a")
    one.tick(0.0)
    one.claimed(1, True, 0.0)
    one.heard(1, 0.1)
    ports.take()
    one.peer_said(orphan("c", newest=6), 1.5)
    assert ports.take() == ["step down"]


# -- voting --------------------------------------------------------------------------------------------------------


def test_a_vote_is_kept_before_it_is_said() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    ports.to_controller = lambda message: ports.done.append((message, ports.kept[-1].promised))  # type: ignore[method-assign]
    one.answered(m.Canvass(2, "b", (1, 1)), 2.5)
    assert words(ports) == [(m.Vote("c", 2, 1.5), 2)]


def test_one_vote_per_epoch_said_again_to_the_same_only() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    for _ in range(2):
        one.answered(m.Canvass(2, "b", (1, 1)), 2.5)
    assert words(ports) == [m.Vote("c", 2, 1.5)] * 2
    one.answered(m.Canvass(2, "x", (1, 1)), 2.6)
    assert not any(isinstance(done, m.Vote) for done in ports.take())


def test_no_vote_for_who_knows_older_voters() -> None:
    one, ports = follower("c", "a")
    one.lose(2.0)
    one.answered(m.Canvass(2, "b", (1, 0)), 2.5)
    (said,) = words(ports)
    assert isinstance(said, m.Orphan)  # so that it learns of ours
    assert said.membership == one.membership


def test_no_vote_while_the_controller_lives() -> None:
    one, ports = follower("c", "a")
    one.answered(m.Canvass(2, "b", (1, 1)), 2.5)
    assert ports.take() == []
    assert one.ballot.promised == 0


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
    newer = enrolled("a", "c")
    assert one.enrol(newer)
    assert one.enrol(newer)
    assert not one.enrol(msgspec.structs.replace(newer, number=0))
    assert [ballot.membership for ballot in ports.kept] == [newer]
