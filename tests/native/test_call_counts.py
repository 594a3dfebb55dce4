"""Calls added up from one look to the next, from rings that the C code writes, and from any bytes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from resilio_hpc.diagnose.hangs.call_counts import RECORD, CallCounter, busy_ns
from resilio_hpc.diagnose.hangs.call_ring import _RECORD, CAPACITY, SIZE
from tests.native.test_call_ring import write, writer, writing
from tests.support.waiting import until

__all__ = ["writer"]


def test_the_record_is_the_ring_s() -> None:
    assert RECORD.itemsize == _RECORD.size


def test_calls_bytes_and_time_by_operation(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "threads", "300") == 0
    counter = CallCounter(tmp_path / "ring")
    counts = counter.look(time.monotonic_ns())
    assert (counts.begun, counts.completed) == (1200, 1200)
    assert counts.calls == {"all_reduce": 1200}
    assert counts.size_bytes == {"all_reduce": 1200 * 7 * 4}
    assert counts.knows_ends
    before = counts.in_calls_s
    assert 0 < before < 60
    assert counter.look(time.monotonic_ns()).calls == {"all_reduce": 1200}
    assert counts.in_calls_s == before  # none is under way
    counter.close()


def test_more_calls_than_the_ring_holds_are_estimated_from_those_that_it_has(writer: Path, tmp_path: Path) -> None:
    with writing(writer, tmp_path / "ring", 3):
        counter = CallCounter(tmp_path / "ring")
        until(lambda: counter._ring.counts[0] > 3 * CAPACITY, "the ring turns")
        first = counter.look(time.monotonic_ns()).begun
        assert first > 3 * CAPACITY
        assert counter.counts.calls["broadcast"] == pytest.approx(first)
        until(lambda: counter._ring.counts[0] > first + 10, "more calls")
        counts = counter.look(time.monotonic_ns())
        assert counts.calls["broadcast"] == pytest.approx(counts.begun)
    begun = counter.look(time.monotonic_ns()).begun
    in_calls_s = counter.counts.in_calls_s
    counter.look(time.monotonic_ns() + 10**10)  # a call is still open, since its process was killed in it
    assert counter.counts.begun == begun
    assert counter.counts.in_calls_s - in_calls_s == pytest.approx(10.0, rel=0.1)


def records(*times: tuple[int, int]) -> np.ndarray:  # type: ignore[type-arg]
    found = np.zeros(len(times), RECORD)
    found["entered_ns"], found["completed_ns"] = zip(*times, strict=True)
    return found


@pytest.mark.parametrize(
    ("times", "busy"),
    [
        ([(10, 20)], 10),
        ([(10, 20), (30, 45)], 25),
        ([(10, 40), (20, 30)], 30),  # one inside another
        ([(20, 30), (10, 25)], 20),
        ([(90, 0)], 10),  # still under way at 100
        ([(0, 10_000)], 100),
        ([(200, 300)], 0),
        ([(50, 40)], 0),  # ends before it begins
    ],
)
def test_the_time_in_which_a_call_is_under_way(times: list[tuple[int, int]], busy: int) -> None:
    assert busy_ns(records(*times), 0, 100) == busy


def test_any_bytes_give_finite_counts(writer: Path, tmp_path: Path) -> None:
    assert write(writer, tmp_path / "ring", "threads", "100") == 0
    good = (tmp_path / "ring").read_bytes()
    draw = Random(5)
    for turn in range(200):
        damaged = bytearray(good)
        for _ in range(draw.choice((1, 10, 1000))):
            at = draw.randrange(32, len(damaged) - 8)
            damaged[at : at + 8] = draw.choice((draw.randbytes(8), b"\xff" * 8, b"\0" * 8))
        hostile = tmp_path / f"hostile{turn}"
        hostile.write_bytes(damaged[: draw.choice((SIZE, draw.randrange(64, SIZE)))])
        try:
            counter = CallCounter(hostile)
        except OSError:
            continue
        for _ in range(2):
            counts = counter.look(time.monotonic_ns())
            numbers = [counts.in_calls_s, *counts.calls.values(), *counts.size_bytes.values()]
            assert all(math.isfinite(number) and number >= 0 for number in numbers)
        counter.close()
