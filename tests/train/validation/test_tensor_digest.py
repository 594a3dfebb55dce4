"""Digests of tensors: a flipped bit always changes them, on the processor and by the sums that a GPU computes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from resilio_hpc.train.validation import tensor_digest
from resilio_hpc.train.validation.tensor_digest import combined, digest_of, size_of, word_sum

Digest = Callable[[torch.Tensor], int]


def by_crc(tensor: torch.Tensor) -> int:
    found = digest_of(tensor, 0, size_of(tensor))
    assert isinstance(found, int)
    return found


def by_sum(tensor: torch.Tensor) -> int:
    return int(word_sum(tensor.contiguous().reshape(-1), 0, size_of(tensor)))


BOTH = pytest.mark.parametrize("digest", [by_crc, by_sum])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
def test_each_flipped_bit_changes_it(digest: Digest, dtype: torch.dtype) -> None:
    tensor = torch.randn(4097).to(dtype) if dtype is not torch.uint8 else torch.randint(0, 255, (4097,), dtype=dtype)
    before, data = digest(tensor), tensor.view(torch.uint8)
    draw = random.Random(1)
    for _ in range(300):
        at, bit = draw.randrange(data.numel()), 1 << draw.randrange(8)
        data[at] ^= bit
        assert digest(tensor) != before
        data[at] ^= bit
    assert digest(tensor) == before


@pytest.mark.parametrize("bit", range(32))
def test_each_bit_of_a_word_counts_in_a_sum(bit: int) -> None:
    for at in (0, 1, 77, 4095):
        tensor = torch.zeros(4096, dtype=torch.int32)
        before = by_sum(tensor)
        tensor[at] = -(1 << 31) if bit == 31 else 1 << bit
        assert by_sum(tensor) != before


@BOTH
def test_moved_exchanged_and_periodic_values_change_it(digest: Digest) -> None:
    tensor = torch.randn(1 << 12)
    changed = [tensor.roll(1), tensor.roll(64), tensor.flip(0), tensor.view(64, 64).t().contiguous().view(-1)]
    for period in (2, 8, 64, 4096):
        stripes = tensor.clone()
        stripes.view(torch.int32)[::period] ^= 1 << 20
        changed.append(stripes)
    pairs = tensor.clone()
    pairs.view(torch.int32)[:2] += torch.tensor([1, -1], dtype=torch.int32)  # what a plain sum does not see
    assert len({digest(one) for one in (tensor, pairs, *changed)}) == 2 + len(changed)


def test_the_sum_does_not_depend_on_how_many_words_are_weighted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3000)
    tail = tensor.clone()
    tail[-1] += 1.0
    monkeypatch.setattr(tensor_digest, "CHUNK", 512)
    monkeypatch.setattr(tensor_digest, "_weights", {})
    assert by_sum(tensor) == by_sum(tensor.clone()) != by_sum(tail)
    swapped = torch.cat([tensor[512:1024], tensor[:512], tensor[1024:]])  # whole chunks in another order
    assert by_sum(swapped) != by_sum(tensor)


@BOTH
def test_it_is_of_the_elements_and_not_of_their_layout(digest: Digest) -> None:
    tensor = torch.randn(30, 7)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(torch.nn.Parameter(tensor)) == digest(tensor)
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_parts_of_odd_sizes() -> None:
    tensor = torch.randint(0, 255, (1003,), dtype=torch.uint8)
    before = [digest_of(tensor, start, min(start + 64, 1003)) for start in range(0, 1003, 64)]
    tensor[1002] ^= 1
    after = [digest_of(tensor, start, min(start + 64, 1003)) for start in range(0, 1003, 64)]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_a_change_of_one_of_several_numbers_never_cancels() -> None:
    draw = random.Random(2)
    for _ in range(200):
        values = [draw.getrandbits(64) for _ in range(5)]
        other = list(values)
        other[draw.randrange(5)] ^= 1 << draw.randrange(64)
        assert combined(values) != combined(other)
