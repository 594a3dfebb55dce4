"""What becomes of the batch and of the order of samples when the number of ranks changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc import train
from resilio_hpc.core.errors import UsageError
from resilio_hpc.train.place import _layout


@pytest.mark.parametrize(("ranks", "steps"), [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)])
def test_a_kept_batch_is_made_of_fewer_micro_batches_with_more_ranks(ranks: int, steps: int) -> None:
    assert train.accumulation_steps(96, 8, ranks) == steps
    plan = train.keep_batch(96, 8, ranks)
    assert (plan.global_batch, plan.accumulation, plan.learning_rate_factor) == (96, steps, 1.0)


def test_what_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(UsageError) as error:
        train.accumulation_steps(96, 8, 5)
    assert str(error.value) == (
        "a global batch of 96 cannot be made of micro batches of 8 on 5 data-parallel ranks, which take 40 samples at "
        "a time: the nearest number of ranks is 4 or 6, the nearest batch is 80 or 120"
    )
    with pytest.raises(UsageError, match=r"40 samples at a time: the nearest batch is 80 or 120$"):
        train.accumulation_steps(100, 8, 5)
    with pytest.raises(UsageError, match=r"the nearest number of ranks is 2, the nearest batch is 24$"):
        train.accumulation_steps(16, 8, 3)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_is_no_batch(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="at least one"):
        train.accumulation_steps(*wrong)


def test_a_scaled_batch_grows_with_the_ranks_and_the_learning_rate_with_it() -> None:
    plan = train.scale_batch(96, 8, data_parallel=6, reference_data_parallel=4)
    assert (plan.global_batch, plan.accumulation, plan.learning_rate_factor) == (144, 3, 1.5)


@given(
    micro=st.integers(1, 5), ranks=st.lists(st.integers(1, 6), min_size=1, max_size=5), size=st.integers(1, 60),
    seed=st.integers(0, 1 << 40), shuffle=st.booleans(),
)  # fmt: skip
def test_no_sample_is_lost_or_doubled_however_the_ranks_change(
    micro: int, ranks: list[int], size: int, seed: int, shuffle: bool
) -> None:
    """Each step with another number of ranks: together the steps use each epoch's samples exactly once, in order."""
    order = train.SampleOrder(size, seed, shuffle)
    position, used = 0, []
    for count in ranks * 4:
        plan = train.keep_batch(60 * micro, micro, count)
        shares = [[p for part in plan.micro_batches(position, rank) for p in part] for rank in range(count)]
        assert {len(share) for share in shares} == {60 * micro // count}
        positions = sorted(p for share in shares for p in share)
        assert positions == list(range(position, position + plan.global_batch))
        used += order.samples(range(position, position + plan.global_batch))
        position += plan.global_batch
    for begin, end in pairwise(range(0, position + 1, size)):
        assert sorted(used[begin:end]) == list(range(size))


def test_the_order_is_the_seeds_and_each_epoch_has_its_own() -> None:
    order = train.SampleOrder(1000, seed=7)
    first, second = order.samples(range(1000)), order.samples(range(1000, 2000))
    assert first != second and first != list(range(1000)) and (order.epoch(999), order.epoch(1000)) == (0, 1)
    assert first == train.SampleOrder(1000, seed=7).samples(range(1000))
    assert first != train.SampleOrder(1000, seed=8).samples(range(1000))
    assert train.SampleOrder(5, shuffle=False).samples(range(7)) == [0, 1, 2, 3, 4, 0, 1]


def test_an_order_is_mixed_well_enough() -> None:
    """Neighbours in the data set are no neighbours in the order, and halves of an epoch hold halves of the data set."""
    size = 10_000
    order = train.SampleOrder(size, seed=1).samples(range(size))
    near = sum(abs(one - other) < 10 for one, other in pairwise(order))
    assert near < size * 0.004  # 0.2 % by chance
    assert abs(sum(sample < size // 2 for sample in order[: size // 2]) - size // 4) < 200


def test_a_huge_data_set_needs_no_memory() -> None:
    order = train.SampleOrder(10**12, seed=3)
    found = order.samples(range(2000))
    assert len(set(found)) == 2000 and max(found) > 9 * 10**11


def test_mistakes_are_told() -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        train.SampleOrder(0)
    with pytest.raises(UsageError, match="0 or more"):
        train.SampleOrder(3).sample(-1)
    with pytest.raises(UsageError, match="no data-parallel rank 4 of 4"):
        list(train.keep_batch(8, 1, 4).micro_batches(0, 4))


# -- the layout ------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_environments_if_it_is_of_this_world() -> None:
    environment = {"RESILIO_TP": "2", "RESILIO_PP": "2", "RESILIO_DP": "3"}
    assert _layout(environment, 12) == (2, 2, 3)
    assert _layout(environment, 8) == _layout({}, 8) == _layout({**environment, "RESILIO_TP": "x"}, 8) == (1, 1, 8)


def test_copies_of_the_model_are_numbered_as_megatron_does() -> None:
    ranks = [
        train.Run(rank, 8, 0, 0, 0, None, None, False, 2, 2, 2).data_parallel_rank  # type: ignore[arg-type]
        for rank in range(8)
    ]
    assert ranks == [0, 0, 1, 1, 0, 0, 1, 1]
