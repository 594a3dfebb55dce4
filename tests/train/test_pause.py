"""A rank that pauses at a boundary goes on, whatever ends the pause: one thread trains, as another one hears."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from resilio_hpc.core.rank_link import PAUSED, PauseConfirmed, Resume, Section, StopAck, StopAt, StopConfirmed
from resilio_hpc.train.agreed_stop import AgreedStop
from tests.support.waiting import PATIENCE_S, until

LONG_S = 3600.0


class Rank:
    """A rank whose loop is at a boundary."""

    def __init__(self) -> None:
        self.said: list[StopAck | Section] = []
        self.stop = AgreedStop(self.said.append)
        self._thread: threading.Thread | None = None
        self.stopped: list[bool] = []

    def at(self, completed: int) -> None:
        self._thread = threading.Thread(target=lambda: self.stopped.append(self.stop.at_boundary(completed)))
        self._thread.start()

    def pauses_at(self, completed: int, limit_s: float = LONG_S) -> Rank:
        """It is paused there."""
        self.stop.at_boundary(completed - 1)
        self.stop.on_stop_at(StopAt(completed))
        self.stop.on_pause_confirmed(PauseConfirmed(completed, limit_s))
        self.at(completed)
        until(lambda: Section(PAUSED) in self.said, "the pause", lambda: self.said)
        return self

    def goes_on(self) -> bool:
        """Whether it trains again, and said so."""
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.said[-1] == Section("")
        return self.stopped == [False]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.stop.on_lost()


ENDS: dict[str, Callable[[Rank], None]] = {
    "resume": lambda rank: rank.stop.on_resume(Resume()),
    "the agent is gone": lambda rank: rank.stop.on_lost(),
    "a later boundary": lambda rank: rank.stop.on_stop_at(StopAt(20)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_pause_ends(rank: Rank, end: str) -> None:
    rank.pauses_at(10)
    assert rank.stopped == []
    ENDS[end](rank)
    assert rank.goes_on()


def test_a_pause_without_an_end_has_a_time_limit(rank: Rank) -> None:
    assert rank.pauses_at(10, limit_s=0.05).goes_on()
    rank.stop.on_resume(Resume())  # late
    assert not rank.stop.at_boundary(11)


def test_after_a_pause_the_ranks_can_pause_and_stop_again(rank: Rank) -> None:
    rank.pauses_at(10)
    rank.stop.on_resume(Resume())
    assert rank.goes_on()
    rank.said.clear()
    rank.pauses_at(12)
    rank.stop.on_stop_at(StopAt(12))  # a stop at the boundary where it pauses
    rank.stop.on_stop_confirmed(StopConfirmed(12))
    rank.goes_on()
    assert rank.stopped == [False, True]


def test_a_pause_that_was_called_off_before_the_boundary_holds_up_no_rank(rank: Rank) -> None:
    rank.stop.at_boundary(5)
    rank.stop.on_stop_at(StopAt(7))
    rank.stop.on_pause_confirmed(PauseConfirmed(7, LONG_S))
    rank.stop.on_resume(Resume())
    assert not rank.stop.at_boundary(7)
    assert rank.said == [StopAck(7, True, 6)]


def test_a_pause_at_a_boundary_that_the_rank_has_passed_is_none(rank: Rank) -> None:
    rank.stop.at_boundary(9)
    rank.stop.on_stop_at(StopAt(8))
    rank.stop.on_pause_confirmed(PauseConfirmed(8, LONG_S))
    assert not rank.stop.at_boundary(10)
    assert rank.said == [StopAck(8, False, 10)]
