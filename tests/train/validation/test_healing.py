"""Which replica has a tensor that is not right."""

from __future__ import annotations

from resilio_hpc.train.validation.healing import CorruptTensor, corrupt_tensors


def test_more_than_half_are_right() -> None:
    assert corrupt_tensors([[1, 2, 3], [1, 2, 3], [1, 9, 3]], [[1, 1, 1]] * 3) == [CorruptTensor(1, (2,), 0)]
    assert corrupt_tensors([[9, 2, 3, 4], [1, 2, 3, 4], [1, 7, 3, 4]], [[1, 1, 1, 1]] * 3) == [
        CorruptTensor(0, (0,), 1), CorruptTensor(1, (2,), 0),
    ]  # fmt: skip


def test_of_two_the_finite_one_is_right() -> None:
    assert corrupt_tensors([[1, 2], [1, 3]], [[1, 0], [1, 1]]) == [CorruptTensor(1, (0,), 1)]


def test_shards_and_experts_are_no_replicas() -> None:
    shards = [[10, 20, 7], [11, 21, 7], [12, 22, 7]]
    assert corrupt_tensors(shards, [[1, 1, 1], [1, 0, 1], [1, 1, 1]]) == []
    assert corrupt_tensors(shards[:2], [[1, 0, 1], [1, 1, 1]]) == []
    assert corrupt_tensors([[1, 1, 1, 5], [1, 1, 1, 6]], [[1, 1, 1, 1]] * 2) == []
    mostly = [[1, 2, 9], [3, 4, 9], [1, 2, 9]]  # more than half of the tensors differ
    assert corrupt_tensors(mostly, [[1, 1, 1]] * 3) == []


def test_two_finite_ones_are_left_as_they_are() -> None:
    assert corrupt_tensors([[1, 2], [1, 3]], [[1, 1], [1, 1]]) == []
    assert corrupt_tensors([[1], [2], [3]], [[1]] * 3) == []


def test_equal_replicas_and_no_tensors() -> None:
    assert corrupt_tensors([[1, 2]] * 4, [[1, 0]] * 4) == []
    assert corrupt_tensors([[], []], [[], []]) == []
