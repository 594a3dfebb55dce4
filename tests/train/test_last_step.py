"""A rank's last save: asked for by its agent or because of an error, once, and never the reason of another end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from resilio_hpc.core.rank_link import HoldsSteps, LastStepMessage, LastStepSaved, SaveLastStep, SavingLastStep
from resilio_hpc.train import last_step
from resilio_hpc.train.last_step import LastStep, save_before_end, the_last_step
from tests.support.waiting import until

SAVED = [HoldsSteps(True), SavingLastStep(), LastStepSaved(7)]


ERROR = ValueError("a mistake")


class Holder:
    """A save that can be made up for later."""

    replicated = True

    def __init__(self, save: Callable[[], int], shared: str | None = "") -> None:
        self.save_held, self.shared = save, shared
        self.is_given_up = False

    def hold(self, step: int) -> None:
        raise AssertionError("a last save begins no step")

    def give_up_step(self) -> None:
        self.is_given_up = True

    def state(self) -> None:
        return None


class Link:
    """What the agent hears."""

    def __init__(self) -> None:
        self.said: list[LastStepMessage] = []
        self.one: LastStep = the_last_step(self.said.append)


@pytest.fixture
def link() -> Iterator[Link]:
    yield Link()
    last_step._last.clear()


def test_an_agents_order_is_carried_out_in_another_thread(link: Link) -> None:
    threads: list[str] = []

    def save() -> int:
        threads.append(threading.current_thread().name)
        return 7

    link.one.offer(Holder(save))
    link.one.on_order(SaveLastStep())
    until(lambda: link.said == SAVED, "the answer", lambda: link.said)
    assert threads == ["resilio-last-step"]


def test_it_is_saved_once(link: Link) -> None:
    link.one.offer(Holder(lambda: 7))
    save_before_end(ERROR)
    link.one.save()
    assert link.said == SAVED
    link.one.offer(Holder(lambda: 8))  # another loop
    save_before_end(ERROR)
    assert link.said[3:] == [HoldsSteps(True), SavingLastStep(), LastStepSaved(8)]


def test_a_save_ahead_does_not_stand_for_the_last_one(link: Link) -> None:
    finished = iter((7, 8))
    link.one.offer(Holder(lambda: next(finished)))
    for ahead in (True, False):
        link.one.save(ahead)
    link.one.save()
    assert link.said[1:] == [SavingLastStep(), LastStepSaved(7), SavingLastStep(), LastStepSaved(8)]


def test_what_goes_wrong_is_an_answer(link: Link) -> None:
    def fail() -> int:
        raise MemoryError("no room")

    link.one.offer(Holder(fail))
    save_before_end(ERROR)
    assert link.said[-1] == LastStepSaved(-1, "MemoryError: no room")
    save_before_end(ERROR)  # it may be tried again
    assert len(link.said) == 5


def test_a_script_that_offers_nothing_is_not_asked_for_more(link: Link) -> None:
    save_before_end(ERROR)
    link.one.save()
    assert link.said == []


def test_an_error_in_the_last_save_hides_no_other(link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    link.one.offer(Holder(interrupted))
    save_before_end(ERROR)
    assert "the last finished step is not saved: KeyboardInterrupt()" in capsys.readouterr().err


def test_where_a_peer_has_ended_the_agents_order_is_waited_for(link: Link) -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
    link.one.offer(Holder(lambda: 7, shared=None))
    waits = threading.Thread(target=save_before_end, args=(lost,))
    waits.start()
    assert link.said == [HoldsSteps(False)]
    link.one.on_order(SaveLastStep())
    waits.join()
    until(lambda: len(link.said) == 3, "the answer", lambda: link.said)
    assert link.said[1:] == SAVED[1:]


def test_without_an_order_all_ranks_may_live_and_it_is_saved(link: Link) -> None:
    link.one.offer(Holder(lambda: 7, shared=None))
    save_before_end(RuntimeError("Connection reset by peer"))
    assert link.said[1:] == SAVED[1:]


def test_other_ranks_may_have_the_same_tensors_later_on(link: Link) -> None:
    link.one.offer(Holder(lambda: 7, shared=None))
    for shared in (None, "a group", "a group"):
        link.one.holds(shared)
    assert link.said == [HoldsSteps(False), HoldsSteps(True, "a group")]


def test_no_save_waits_for_a_step_that_was_left_by_an_error(link: Link) -> None:
    link.one.give_up_step()  # nothing is offered yet
    holder = Holder(lambda: 7)
    link.one.offer(holder)
    link.one.give_up_step()
    assert holder.is_given_up
