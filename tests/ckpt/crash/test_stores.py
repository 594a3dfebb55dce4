"""Any store, at any of its calls: the process dies, an error comes, it hangs. Older steps stay, and life goes on."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt.saver.messages import Answer, Committed, SaverFailed
from resilio_hpc.ckpt.store.mounts import store_of
from tests.support.ckpt.hooked_store import Killed
from tests.support.ckpt.stores import KINDS, Place, place_in
from tests.support.waiting import PATIENCE_S, until

NewPlace = Callable[[], Place]


@pytest.fixture(params=KINDS)
def new_place(request: pytest.FixtureRequest, tmp_path: Path, shm: Path) -> Iterator[NewPlace]:
    """Give an empty place of one kind, as often as called; each takes the place of the one before."""
    open_places: list[Any] = []

    def make() -> Place:
        leave()
        directory = shm / f"{len(list(shm.iterdir()))}"
        directory.mkdir()
        open_places.append(place_in(request.param, directory, tmp_path))
        place: Place = open_places[-1].__enter__()
        place.take_over(1)
        return place

    def leave() -> None:
        while open_places:
            open_places.pop().__exit__(None, None, None)

    yield make
    leave()


class At:
    """Do something at the call of that number, and perhaps at all that follow."""

    def __init__(self, number: int, error: Callable[[], BaseException], goes_on: bool) -> None:
        self.number, self.error, self.goes_on = number, error, goes_on
        self.calls: list[str] = []

    def __call__(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.number or (self.goes_on and len(self.calls) > self.number):
            raise self.error()


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def calls_of_a_save(new_place: NewPlace) -> list[str]:
    """All calls of the save of step 2, after which step 1 goes."""
    place = new_place()
    assert isinstance(place.save(1), Committed)
    counter = At(0, io_error, False)
    place.before.append(counter)
    assert isinstance(place.save(2), Committed)
    place.before.clear()
    assert place.steps() == [2]
    return counter.calls


def test_a_process_that_dies_at_any_call_leaves_a_step_and_its_successor_goes_on(new_place: NewPlace) -> None:
    calls = calls_of_a_save(new_place)
    assert {"new_file", "appear", "put_in_place", "move_away", "recycle"} <= set(calls)
    left = set()
    for number in range(1, len(calls) + 1):
        place = new_place()
        place.save(1)
        place.before.append(At(number, Killed, True))
        with pytest.raises(Killed):
            place.save(2)
        place.before.clear()
        steps = place.steps()
        assert steps in ([1], [1, 2], [2]), number
        assert place.restored() == steps[-1]
        left.add(tuple(steps))
        place.take_over(2)
        assert isinstance(place.save(3, epoch=2), Committed)
        assert place.steps() == [3]
        assert isinstance(place.save(4, epoch=2), Committed)
        names = [name for name in place.store.names(place.directory) if name != ".worn"]
        assert sorted(names) == ["epoch-fence", "latest", "step-0000000004"], number
    assert left == {(1,), (1, 2), (2,)}


@pytest.mark.parametrize("new_place", ["file system", "memory"], indirect=True)
@pytest.mark.parametrize(("error", "goes_on"), [(io_error, False), (no_space, True)])
def test_an_error_at_any_call_fails_that_save_alone(
    error: Callable[[], OSError], goes_on: bool, new_place: NewPlace
) -> None:
    calls = calls_of_a_save(new_place)
    answers: set[str] = set()
    for number in range(1, len(calls) + 1):
        place = new_place()
        place.save(1)
        place.before.append(At(number, error, goes_on))
        answer = place.save(2)
        place.before.clear()
        answers.add(type(answer).__name__)
        assert isinstance(answer, SaverFailed | Committed)
        if isinstance(answer, SaverFailed):
            shown = place.steps()  # with 2, where it is in place and its name could not be made durable
            assert shown == [1] or (shown == [1, 2] and calls[number - 1] == "sync"), (number, answer)
            assert answer.error
        else:
            assert place.steps()[-1] == 2, number
        assert isinstance(place.save(3), Committed)
        assert place.restored() == 3
    assert answers == {"SaverFailed", "Committed"}


def test_a_store_that_hangs_holds_up_the_save_alone(new_place: NewPlace) -> None:
    """Also one that is slow: every call takes its time."""
    place = new_place()
    place.save(1)
    goes_on, hangs = threading.Event(), threading.Event()
    saving: list[threading.Thread] = []

    def hang(name: str) -> None:
        if threading.current_thread() in saving and name == "write pieces":
            hangs.set()
            assert goes_on.wait(PATIENCE_S)

    place.before += [hang, lambda name: time.sleep(0.002)]
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(place.save(2)))
    saving.append(thread)
    thread.start()
    assert hangs.wait(PATIENCE_S)
    assert place.steps() == [1]
    assert place.restored() == 1
    assert answers == []
    goes_on.set()
    until(lambda: bool(answers), "the save comes to its end")
    thread.join(PATIENCE_S)
    assert isinstance(answers[0], Committed)
    assert place.restored() == 2


def test_a_controller_that_was_replaced_commits_nothing(new_place: NewPlace) -> None:
    place = new_place()
    place.save(1)
    place.take_over(2)
    answer = place.save(5, epoch=1)
    assert isinstance(answer, SaverFailed)
    assert "epoch 2 has taken over" in answer.error
    assert place.steps() == [1]


def test_saves_of_a_step_at_once_leave_one_of_them_whole(new_place: NewPlace) -> None:
    place = new_place()
    place.save(1)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda epoch: place.save(2, epoch=epoch, keep_last=2), [1, 2, 3, 4]))
    assert any(isinstance(answer, Committed) for answer in answers)
    assert place.steps() == [1, 2]


def test_a_path_belongs_to_the_store_that_was_mounted_for_it(new_place: NewPlace) -> None:
    place = new_place()
    inside = store_of(place.directory / "step-0000000001")
    assert inside is store_of(place.directory.parent)
    assert inside is not store_of(place.directory.parent.parent)
