"""Which replicas differ, in which tensor, and since when."""

from __future__ import annotations

import struct

from resilio_hpc.launch.controller.checkpoints.replica_sweeps import MOST_SWEEPS, ReplicaSweeps, SweepResult
from resilio_hpc.launch.protocol.correctness_messages import EqualReplicas, ReplicasDigested

PARTS = 4
LABELS = ("a", "b", "c", "d")


def digests(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


SAME = digests(1, 2, 3, 4)


def said(
    node: str, found: dict[bytes, tuple[int, ...]], step: int = 8, replicas: int = 4, group: str = "g", first: int = 0,
    mark: int = 7,
) -> ReplicasDigested:  # fmt: skip
    equal = tuple(EqualReplicas(group, replicas, mark, data, ranks, LABELS) for data, ranks in found.items())
    return ReplicasDigested(node, 1, 0, step, first, PARTS, equal)


def taken(*messages: ReplicasDigested) -> list[SweepResult]:
    sweeps = ReplicaSweeps()
    return [result for message in messages for result in sweeps.take(message)]


def test_replicas_that_are_equal() -> None:
    (result,) = taken(said("n1", {SAME: (0, 1)}), said("n2", {SAME: (2, 3)}))
    assert result == SweepResult("g", 5, 8, True, None)


def test_nothing_is_said_before_all_replicas_are_in_and_a_repeated_message_counts_once() -> None:
    assert taken(said("n1", {SAME: (0, 1)}), said("n1", {SAME: (0, 1)})) == []


def test_the_one_that_differs_from_most_is_to_blame() -> None:
    (result,) = taken(said("n1", {SAME: (0, 1)}), said("n2", {digests(1, 2, 9, 8): (3,), SAME: (2,)}))
    found = result.difference
    assert found is not None
    assert (found.ranks, found.certain, found.step, found.part, found.tensor) == ((3,), True, 7, 2, "c")


def test_two_that_differ_cannot_be_told_apart() -> None:
    (result,) = taken(said("n1", {SAME: (0,)}, replicas=2), said("n2", {digests(9, 2, 3, 4): (1,)}, replicas=2))
    found = result.difference
    assert found is not None
    assert (found.ranks, found.certain, found.step, found.tensor) == ((0, 1), False, 5, "a")


def test_half_against_half_and_three_ways_are_not_certain() -> None:
    (half,) = taken(said("n1", {SAME: (0, 1)}), said("n2", {digests(9, 2, 3, 4): (2, 3)}))
    ways = {digests(value, 2, 3, 4): (value,) for value in range(4)}
    (four,) = taken(said("n1", ways))
    for result in (half, four):
        assert result.difference is not None
        assert (result.difference.certain, result.difference.ranks) == (False, (0, 1, 2, 3))


def test_replicas_with_other_tensors_are_no_replicas() -> None:
    (result,) = taken(said("n1", {SAME: (0, 1, 2)}), said("n2", {SAME: (3,)}, mark=8))
    assert result.difference is not None
    assert (result.difference.ranks, result.difference.tensor) == ((3,), "(replicas have different tensors)")


def test_groups_and_steps_are_apart() -> None:
    messages = [
        said("n1", {SAME: (0,)}, replicas=2), said("n1", {digests(5, 5, 5, 5): (1,)}, replicas=2, group="h"),
        said("n2", {SAME: (2,)}, replicas=2, step=12), said("n2", {SAME: (2,)}, replicas=2),
        said("n2", {digests(5, 5, 5, 5): (3,)}, replicas=2, group="h"),
    ]  # fmt: skip
    assert [(result.group, result.end, result.difference) for result in taken(*messages)] == [
        ("g", 8, None), ("h", 8, None),
    ]  # fmt: skip


def test_a_sweep_that_began_late_verifies_nothing() -> None:
    data = digests(3, 4)
    (result,) = taken(said("n1", {data: (0, 1)}, replicas=2, first=2))
    assert (result.begin, result.end, result.whole) == (7, 8, False)
    (other,) = taken(said("n1", {data: (0, 1), digests(3, 9): (2,)}, replicas=3, first=2))
    assert other.difference is not None
    assert (other.difference.ranks, other.difference.part, other.difference.step) == ((2,), 3, 8)


def test_what_never_becomes_whole_is_given_up() -> None:
    sweeps = ReplicaSweeps()
    for step in range(1000):
        sweeps.take(said("n1", {SAME: (0,)}, step=step))
    assert len(sweeps._sweeps) == MOST_SWEEPS
