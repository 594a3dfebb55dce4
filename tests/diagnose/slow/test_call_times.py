"""Own work and waiting, from records of calls."""

from __future__ import annotations

import random

from resilio_hpc.diagnose.hangs.call_ring import CAPACITY, RawCall
from resilio_hpc.diagnose.slow.call_times import CallTimes, TimeSpent

S = 1_000_000_000
IN_FLIGHT = 1


class Records:
    """A ring in memory."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.queued: frozenset[int] = frozenset()

    def add(self, entered: float, completed: float = 0.0, elements: int = 0) -> None:
        self.calls.append([round(entered * S), round(completed * S), elements])

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.calls), 0

    def since(self, first: int) -> list[RawCall]:
        first = max(first, len(self.calls) - CAPACITY)
        return [
            RawCall(number + 1, entered, completed, elements, 0, 1, 8, IN_FLIGHT)
            for number, (entered, completed, elements) in enumerate(self.calls[first:], first)
        ]

    def in_queue(self) -> frozenset[int]:
        return self.queued


def spent(own: float, wait: float, calls: int, rate: float = 0.0) -> TimeSpent:
    return TimeSpent(round(own * S), round(wait * S), calls, rate)


def test_between_calls_is_own_work_and_inside_is_waiting() -> None:
    ring = Records()
    times = CallTimes(ring)
    times.advance(5 * S)
    assert times.cut() == spent(0, 0, 0)  # what came before the first call is no work of a step
    ring.add(10, 11)
    ring.add(14, 14.5)
    times.advance(16 * S)
    assert times.cut() == spent(3 + 1.5, 1.5, 2)


def test_calls_that_overlap_count_once() -> None:
    ring = Records()
    ring.add(10, 13)
    ring.add(11, 12)
    ring.add(12, 15)
    times = CallTimes(ring)
    times.advance(16 * S)
    assert times.cut() == spent(1, 5, 3)


def test_a_call_that_is_not_completed_is_waiting_until_now_and_is_not_counted_twice() -> None:
    ring = Records()
    ring.add(10)
    ring.add(11, 12)
    times = CallTimes(ring)
    times.advance(14 * S)
    assert times.cut() == spent(0, 4, 0)
    ring.calls[0][1] = 15 * S
    times.advance(16 * S)
    assert times.cut() == spent(1, 1, 2)


def test_however_often_it_looks_the_account_is_the_same() -> None:
    draw = random.Random(3)
    ring, looked, once = Records(), None, None
    at = 1.0
    for _ in range(300):
        at += draw.uniform(0, 0.2)
        ring.add(at, at + draw.uniform(0.001, 0.5))
    once, looked = CallTimes(ring), CallTimes(Late(ring))
    end = round((at + 10) * S)
    for now in range(S, end, S // 7):
        looked._ring.now = now  # type: ignore[attr-defined]
        looked.advance(now)
    looked._ring.now = end  # type: ignore[attr-defined]
    looked.advance(end)
    once.advance(end)
    assert looked.total == once.total
    assert once.total.own_ns + once.total.wait_ns == end - ring.calls[0][0]


class Late(Records):
    """The same ring, as it is seen at ``now``: later calls are not there, and later ends are not known."""

    def __init__(self, whole: Records) -> None:
        super().__init__()
        self.now = 0
        self._whole = whole.calls

    @property
    def counts(self) -> tuple[int, int]:
        return sum(call[0] <= self.now for call in self._whole), 0

    def since(self, first: int) -> list[RawCall]:
        self.calls = [[e, c if c <= self.now else 0, n] for e, c, n in self._whole if e <= self.now]
        return super().since(first)


def test_records_that_were_overwritten_unseen_count_for_nothing() -> None:
    ring = Records()
    ring.add(1, 1.5)
    times = CallTimes(ring)
    times.advance(2 * S)
    for number in range(3 * CAPACITY):
        ring.add(2 + number, 2.5 + number)
    end = 2 + 3 * CAPACITY
    times.advance(end * S)
    found = times.cut()
    assert found.calls == 1 + CAPACITY // 2
    assert found.own_ns < CAPACITY * S
    assert abs(found.wait_ns - 0.5 * S * found.calls) < S


def test_a_call_whose_end_is_never_seen_does_not_hold_up_the_account() -> None:
    ring = Records()
    ring.add(1)
    for number in range(600):
        ring.add(2 + number, 2.25 + number)
    times = CallTimes(ring)
    times.advance(700 * S)
    assert times.cut().calls == 600


def test_the_rate_is_that_of_the_fastest_large_call() -> None:
    ring = Records()
    ring.add(1, 2, 1_000_000)  # float32
    ring.add(3, 3.5, 1_000_000)
    ring.add(4, 4.000001, 10)
    times = CallTimes(ring)
    times.advance(5 * S)
    assert times.cut().rate == 8_000_000


def test_where_ends_are_not_seen_nothing_is_measured() -> None:
    ring = Records()
    ring.queued = frozenset({0})
    ring.add(1, 2)
    times = CallTimes(ring)
    times.advance(5 * S)
    assert not times.measured
