"""Valid messages with nonsense in them, in any order: the controller answers with what can be sent and written down."""

from __future__ import annotations

import pytest

from wire_fuzz_controller import Lives, fuzz_controller

QUICK = 10_000
FULL = 300_000


def check(lives: Lives, count: int) -> None:
    assert lives.broke == []
    assert lives.messages >= count
    assert set(lives.phases) == {"gathering", "preparing", "starting", "running", "ended"}


def test_no_message_breaks_a_controller() -> None:
    check(fuzz_controller(QUICK, seed=1), QUICK)


@pytest.mark.slow
def test_hundreds_of_thousands_of_messages_break_no_controller() -> None:
    check(fuzz_controller(FULL, seed=2), FULL)
