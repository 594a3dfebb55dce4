"""Answers go to the connection that an agent listens to, though older ones may still have something to say."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.consensus.connections import Callers, Names, speaks_for


@pytest.mark.parametrize(
    ("said_on", "answered_on"),
    [
        ((b"n1/aa/1", b"n1/aa/2"), b"n1/aa/2"),
        ((b"n1/aa/2", b"n1/aa/1"), b"n1/aa/2"),  # what TCP had kept of an earlier connection
        ((b"n1/aa/9", b"n1/aa/10", b"n1/aa/9"), b"n1/aa/10"),
        ((b"n1/aa/2", b"n1/bb/1"), b"n1/bb/1"),  # after a reboot
        ((b"n1/aa/2", b"n1/aa/x"), b"n1/aa/x"),  # not ours: whoever spoke last
        ((b"n1/aa", b"n1/aa"), b"n1/aa"),
    ],
)
def test_of_one_boot_the_connection_that_was_opened_last_is_answered(
    said_on: tuple[bytes, ...], answered_on: bytes
) -> None:
    known = Callers()
    for name in said_on:
        known.heard("n1", name)
    assert known.name_of("n1") == answered_on
    assert known.name_of("n2") is None


def test_a_process_that_was_killed_is_not_answered_though_its_last_words_come_late() -> None:
    before, after = Names("n1"), Names("n1")
    known, killed = Callers(), before.next()
    for name in (killed, after.next(), newest := after.next(), killed):
        known.heard("n1", name)
    assert known.name_of("n1") == newest
    assert speaks_for(newest, "n1")


def test_of_too_many_whoever_was_silent_for_longest_is_forgotten() -> None:
    known = Callers(most=2)
    for node in ("n1", "n2", "n1", "n3"):
        known.heard(node, f"{node}/aa/1".encode())
    assert [known.name_of(node) for node in ("n1", "n2", "n3")] == [b"n1/aa/1", None, b"n3/aa/1"]


def test_a_connection_speaks_for_its_own_node_only() -> None:
    assert speaks_for(b"n1/aa/1", "n1")
    assert not speaks_for(b"n1/aa/1", "n")
    assert not speaks_for(b"n1/aa/1", "n1/aa")
