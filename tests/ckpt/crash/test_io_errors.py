"""A disk that is full, fails or is read-only at any I/O call: told to who waits, and nothing else is harmed."""

from __future__ import annotations

import errno
import os

import pytest

from tests.support.crash.harm import Harmed

slow = pytest.mark.slow


def errors(*quick: tuple[str, str]) -> list[object]:
    """Parameters: errno, how often, and of how many calls one is tried: of three of ``quick``; each, when slow."""
    every = (("ENOSPC", "once"), ("ENOSPC", "on"), ("EIO", "once"), ("EIO", "on"), ("EROFS", "once"), ("EROFS", "on"))
    return [*((*one, 3) for one in quick), *(pytest.param(*one, 1, marks=slow) for one in every)]


def told(found: dict[str, int], name: str) -> set[str]:
    """What the handles said, which must name the trouble in the system's words, and where it is."""
    errors = set(found) - {"committed"}
    text = os.strerror(getattr(errno, name))
    assert all("was not saved" in said and text in said for said in errors), errors
    return {said.partition(text)[2] for said in errors}


@pytest.mark.parametrize(("name", "how", "every"), errors(("ENOSPC", "once"), ("EIO", "on")))
def test_an_error_at_any_call_fails_that_save_alone_and_says_where(
    name: str, how: str, every: int, harmed: Harmed
) -> None:
    found = harmed("errors_everywhere.py", "alone", name, how, SHIM_EVERY=str(every))
    assert told(found, name) == {": DIRECTORY"}
    assert sum(found.values()) - found["committed"] > 20 // every


EVERY_THIRD = [3, pytest.param(1, marks=slow)]


@pytest.mark.parametrize("every", EVERY_THIRD)
@pytest.mark.parametrize("lacks", ["", "SHIM_NO_EXCHANGE"])
def test_a_step_whose_second_save_fails_at_any_call_stays(lacks: str, every: int, harmed: Harmed) -> None:
    """It alone is there: were it gone, there would be nothing to restore."""
    variables = {"SHIM_EVERY": str(every), **({lacks: "1"} if lacks else {})}
    found = harmed("errors_everywhere.py", "again", "EIO", "once", **variables)
    assert told(found, "EIO") == {": DIRECTORY"}


@pytest.mark.parametrize("every", EVERY_THIRD)
def test_an_error_at_any_call_of_a_prune_harms_no_step_that_stays(every: int, harmed: Harmed) -> None:
    found = harmed("errors_everywhere.py", "prune", "EIO", "once", SHIM_EVERY=str(every))
    assert told(found, "EIO") == {": DIRECTORY"}
    assert found["committed"] > 10 // every


@pytest.mark.parametrize(("name", "how"), [("EROFS", "on"), ("ENOSPC", "once"), ("EIO", "once")])
def test_a_disk_of_the_node_that_fails_costs_the_snapshot(name: str, how: str, harmed: Harmed) -> None:
    found = harmed("errors_everywhere.py", "spill", name, how)
    assert all("DIRECTORY/resilio-arenas" in where or "a snapshot's arena" in where for where in told(found, name))
    assert len(found) > 1


@pytest.mark.parametrize(("name", "how", "every"), errors(("ENOSPC", "once"), ("EIO", "on")))
def test_a_disk_by_way_of_which_steps_are_written_costs_nothing_wherever_it_fails(
    name: str, how: str, every: int, harmed: Harmed
) -> None:
    found = harmed("errors_everywhere.py", "disk", name, how, SHIM_EVERY=str(every))
    assert set(found) == {"committed"}
    assert found["committed"] > 10 // every


@pytest.mark.parametrize(
    ("name", "every"), [("EIO", 3), pytest.param("EIO", 1, marks=slow), pytest.param("ENOSPC", 1, marks=slow)]
)
def test_what_failed_in_one_process_is_told_to_the_others(name: str, every: int, harmed: Harmed) -> None:
    found = harmed("errors_everywhere.py", "two", name, "once", SHIM_EVERY=str(every))
    assert told(found, name) == {": DIRECTORY"}
    assert all(": rank 1: " in said for said in set(found) - {"committed"})
