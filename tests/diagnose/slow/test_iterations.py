"""Iterations in streams of calls: of scripts that report no steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from resilio_hpc.diagnose.hangs.call_ring import CAPACITY, RawCall
from resilio_hpc.diagnose.slow.iterations import FEWEST, HISTORY, Iterations, iteration_of

ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, BARRIER = 1, 2, 3, 4, 5
Call = tuple[int, int]  # op, elements

DDP: Sequence[Call] = [(ALL_REDUCE, 4096)] * 12 + [(ALL_REDUCE, 77)]
LOSS: Sequence[Call] = [(ALL_REDUCE, 1)]
FSDP: Sequence[Call] = (
    [(ALL_GATHER, 50), *[(ALL_GATHER, 64)] * 32]
    + [(ALL_GATHER, 64), (REDUCE_SCATTER, 64)] * 32
    + [(REDUCE_SCATTER, 50)]
)
PIPELINE: Sequence[Call] = [(6, 32), (7, 32)] * 8 + [(ALL_REDUCE, 999), (BARRIER, 0)]
EVALUATION: Sequence[Call] = [(ALL_GATHER, 7), (ALL_REDUCE, 2)] * 6
STREAMS = {"DDP": DDP, "with the loss": [*DDP, *LOSS], "FSDP": FSDP, "pipeline": PIPELINE, "one call": LOSS,
           "accumulation": [*[*FSDP[:65]] * 4, *FSDP]}  # fmt: skip


class Ring:
    """A ring in memory."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def since(self, first: int) -> list[RawCall]:
        first = max(first, len(self.calls) - CAPACITY)
        return [
            RawCall(number + 1, 1, 2, elements, 0, op, 8, 2)
            for number, (op, elements) in enumerate(self.calls[first:], first)
        ]


def marks(calls: Iterable[Call]) -> list[tuple[int, int, int, int]]:
    return [(op, 8, elements, 0) for op, elements in calls]


@pytest.mark.parametrize("calls", STREAMS.values(), ids=STREAMS)
def test_the_shortest_sequence_that_comes_again_is_the_iteration(calls: Sequence[Call]) -> None:
    stream = list(calls) * (HISTORY // len(calls))
    begins = len(calls) // 3
    assert iteration_of(marks(stream[begins:])) == len(calls)


@pytest.mark.parametrize("calls", STREAMS.values(), ids=STREAMS)
def test_iterations_are_counted_whatever_comes_between_them(calls: Sequence[Call]) -> None:
    ring, draw = Ring(), random.Random(1)
    ring.calls = [(BROADCAST, size) for size in range(20)]  # DDP's first ones
    found = Iterations(ring)
    done_at = []
    for iteration in range(600):
        ring.calls += calls
        if iteration % 100 == 70:
            ring.calls += EVALUATION
        if draw.random() < 0.7:  # looks come at any time
            found.advance()
        done_at.append(found.done)
    found.advance()
    begun = next(number for number, done in enumerate(done_at) if done >= 0)
    assert begun <= 3 * HISTORY // len(calls)
    assert abs(found.done - (600 - begun)) <= 7 + 600 * 0.02


def test_calls_in_no_order_are_no_iteration() -> None:
    draw, ring = random.Random(2), Ring()
    found = Iterations(ring)
    for _ in range(200):
        ring.calls += [(draw.randrange(1, 8), draw.randrange(50)) for _ in range(30)]
        found.advance()
    assert found.done == -1


def test_another_iteration_is_found_and_the_count_goes_on() -> None:
    ring = Ring()
    found = Iterations(ring)
    for calls in (DDP, FSDP):
        for _ in range(300):
            ring.calls += calls
            found.advance()
    assert 450 < found.done <= 600


def test_what_was_overwritten_unseen_is_not_counted_and_breaks_nothing() -> None:
    ring = Ring()
    found = Iterations(ring)
    for _ in range(20):
        ring.calls += list(FSDP) * 20
        found.advance()
        before = found.done
        ring.calls += list(FSDP) * 40  # more than the ring holds
    assert 100 < before < 1200


def test_few_calls_are_not_judged() -> None:
    ring = Ring()
    found = Iterations(ring)
    ring.calls += list(LOSS) * (FEWEST - 1)
    found.advance()
    assert found.done == -1
    assert iteration_of([]) == 0
