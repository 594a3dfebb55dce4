"""Bounds of how far a node's clock is ahead, from messages that go to and fro."""

from __future__ import annotations

import random

from resilio_hpc.diagnose.cascade.clocks import JUMP_S, ClockBounds


def talk(
    bounds: ClockBounds, ahead_s: float, drift: float, ways: tuple[float, float], begin: float, count: int
) -> float:
    """Exchange messages, one a second. Return when the last one came."""
    there, back = ways
    draw = random.Random(1)
    at, now = begin, begin
    for number in range(count):
        at = begin + number
        stamp = at - 0.9  # the answer before was sent then, and waited with the agent until now
        age_s = at - (stamp + back + draw.random() * 0.001)
        now = at + there + draw.expovariate(200)
        bounds.heard(at * (1 + drift) + ahead_s, stamp + age_s, now)
    return now


def test_the_true_offset_lies_within_the_bounds_whichever_way_is_slow() -> None:
    for ways in ((0.0001, 0.2), (0.2, 0.0001), (0.001, 0.001)):
        bounds = ClockBounds()
        now = talk(bounds, 3.0, 30e-6, ways, 100.0, 40)
        found = bounds.to_local(now * (1 + 30e-6) + 3.0, now)
        assert found is not None
        assert abs(found[0] - now) <= found[1] < 0.13


def test_short_round_trips_count() -> None:
    bounds = ClockBounds()
    talk(bounds, 0.0, 0.0, (0.0001, 0.0001), 100.0, 20)
    quick = bounds.high - bounds.low
    bounds.heard(121.0, 119.0, 123.0)
    assert bounds.high - bounds.low < quick + 0.01


def test_bounds_widen_while_no_message_comes() -> None:
    bounds = ClockBounds()
    now = talk(bounds, 0.0, 0.0, (0.0001, 0.0001), 100.0, 20)
    soon, later = bounds.to_local(now, now), bounds.to_local(now, now + 600)
    assert soon is not None and later is not None
    assert later[1] > soon[1] + 0.1


def test_a_clock_that_was_set_is_believed_again_and_times_near_the_jump_are_uncertain() -> None:
    bounds = ClockBounds()
    talk(bounds, 0.0, 0.0, (0.0001, 0.0001), 100.0, 20)
    now = talk(bounds, 7.0, 0.0, (0.0001, 0.0001), 120.0, 20)
    found = bounds.to_local(now + 7.0, now)
    assert found is not None
    assert abs(found[0] - now) < 0.1 and found[1] > 6.0
    now = talk(bounds, 7.0, 0.0, (0.0001, 0.0001), 120.0 + JUMP_S + 30, 20)
    found = bounds.to_local(now + 7.0, now)
    assert found is not None and found[1] < 0.1


def test_nothing_is_known_before_a_round_trip_nor_from_a_stamp_of_the_future() -> None:
    bounds = ClockBounds()
    assert bounds.to_local(5.0, 5.0) is None
    bounds.heard(5.0, 9.0, 5.0)
    assert bounds.to_local(5.0, 5.0) is None
