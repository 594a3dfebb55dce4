"""Flat shards and the buckets of distributed optimizers: saved in one layout, restored in another, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt import (
    DP_RESHARDABLE,
    FULLY_RESHARDABLE,
    AnyLayout,
    BucketParameter,
    FlatBucket,
    FlatSlab,
    Slab,
    optimizer_layouts,
)
from resilio_hpc.ckpt.state.expected import expected_bytes
from resilio_hpc.ckpt.state.flat_slab import ranges
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.ckpt.state.put_back import put_back
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.difference import differences
from resilio_hpc.core.errors import CheckpointError, LayoutMismatch, UsageError
from tests.ckpt.test_slabs import cut, rank, save

slow = pytest.mark.slow
SHAPES = [(5,), (3, 4), (2, 3, 4), (1, 1, 3), (2, 1, 2, 3), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_range_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    whole = np.arange(prod(shape)).reshape(shape)
    for first in range(whole.size):
        for end in range(first + 1, whole.size + 1):
            boxes = list(ranges(shape, first, end))
            assert np.concatenate([cut(whole, box).ravel() for box in boxes]).tolist() == list(range(first, end))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def shards(value: Any, count: int, fill: bool = True) -> list[FlatSlab]:
    """A tensor as ``count`` processes hold it flat; the last ones may have nothing."""
    flat = value.reshape(-1)
    share = -(-len(flat) // count)
    places = [(min(number * share, len(flat)), min((number + 1) * share, len(flat))) for number in range(count)]
    return [
        FlatSlab(flat[first:end].clone() if fill else torch.zeros(end - first), value.shape, first)
        for first, end in places
    ]


@pytest.mark.parametrize("shape", [(5, 7), *(pytest.param(one, marks=slow) for one in ((3, 1, 4), (11,)))])
def test_any_number_of_processes_restores_flat_shards(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.rand(shape)
    save(tmp_path, [{"value": shard, "step": 3} for shard in shards(whole, 3)])
    for count in (1, 2, 3, 4, 13):
        wanted = shards(whole, count)
        for number, mine in enumerate(shards(whole, count, False)):
            assert rank(tmp_path, number, count).restore({"value": mine, "step": 0}) == (1, {"value": mine, "step": 3})
            assert torch.equal(mine.tensor, wanted[number].tensor)
    plain = {"value": torch.zeros(shape), "step": 0}
    rank(tmp_path, 0, 1).restore(plain)
    assert torch.equal(plain["value"], whole)
    if len(shape) == 2:  # several boxes each
        with pytest.raises(LayoutMismatch, match="give a state"):
            rank(tmp_path, 1, 3).restore()


@slow
@given(data=st.data())
def test_ranges_of_boxes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A box of rows and columns, flat in pieces, as tensor and data parallelism together cut it."""
    directory = tmp_path_factory.mktemp("ranges")
    rows, columns, split = (data.draw(st.integers(1, 6)) for _ in range(3))
    whole = np.arange(float(rows * columns)).reshape(rows, columns)
    edge = min(split, columns)
    states = []
    for first, last in ((0, edge), (edge, columns)):
        flat = whole[:, first:last].ravel()
        at = data.draw(st.integers(0, len(flat)))
        states += [
            {"value": FlatSlab(part, whole.shape, start, (0, first), (rows, last - first))}
            for part, start in ((flat[:at], 0), (flat[at:], at))
        ]
    save(directory, states)
    found = {"value": np.zeros((rows, columns))}
    rank(directory, 0, 1).restore(found)
    assert found["value"].tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("no one dimension", {"tensor": torch.zeros(2, 2)}),
        ("not in a box", {"first": 9}),
        ("not in a box", {"first": -1}),
        ("not in a box", {"first": 1.0}),
        ("together", {"start": (0, 0)}),
        ("outside", {"start": (2, 0), "shape": (3, 4)}),
        ("of a single number", {"tensor": torch.zeros(0), "global_shape": ()}),
    ],
)
def test_what_is_no_shard_is_refused(words: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=words):
        FlatSlab(**{"tensor": torch.zeros(4), "global_shape": (3, 4), **change})


def test_a_missing_shard_is_not_committed(tmp_path: Path) -> None:
    states = [{"value": shard} for shard in shards(torch.rand(4, 5), 3)]
    with pytest.raises(CheckpointError, match="of the 20 elements of value"):
        save(tmp_path, [states[0], {}, states[2]])


def test_a_change_in_any_part_is_a_difference(tmp_path: Path) -> None:
    value = torch.rand(3, 4)
    save(tmp_path, [{"value": FlatSlab(value.reshape(-1)[:10].clone(), (10,))}, {}], 1)
    for step in (2, 3):
        flat = value.reshape(-1)[: 2 + 8].clone()
        flat[-1] += step
        save(tmp_path, [{"value": FlatSlab(flat, (3, 4))}, {"value": FlatSlab(torch.zeros(2), (3, 4), 10)}], step)
    two, three = (checkpoint_index.manifest_of(tmp_path, step) for step in (2, 3))
    (found,) = differences((tmp_path, two), (tmp_path, three))
    assert (found.path, found.what) == ("value$2", "content, in 1 of 1 block(s)")


def test_tied_shards_without_elements_stay_tied(tmp_path: Path) -> None:
    whole = torch.rand(2, 3)
    states = [{"one": shard, "other": shard} for shard in shards(whole, 4)]
    assert not len(states[3]["one"].tensor)
    save(tmp_path, states)
    (mine,) = shards(whole, 1, False)
    rank(tmp_path, 0, 1).restore({"one": mine, "other": mine})
    assert torch.equal(mine.tensor, whole.flatten())


def test_a_held_shard_is_put_back() -> None:
    small, large = torch.arange(6.0), torch.zeros(3 << 20)
    layouts = AnyLayout({"a": {"x": FlatSlab(small[1:], (2, 3), 1)}, "b": {}}, "a")
    state = {"large": FlatSlab(large, (3, 1 << 20)), "layouts": layouts, "empty": FlatSlab(small[:0], (2, 3))}
    assert expected_bytes(state) == small[1:].nbytes + large.nbytes
    held = HeldState(1, state)
    assert [leaf.path for leaf in held.flattened().leaves] == ["large", "layouts/a/x", "layouts/a/x", "empty"]
    small += 1
    assert put_back(held, state) is state
    assert small.tolist() == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    large += 1
    with pytest.raises(CheckpointError, match="large was changed"):
        put_back(held, state)


# -- buckets ---------------------------------------------------------------------------------------------------

WIDTH, HIDDEN, LAYERS = 6, 8, 4
KEYS = ("master", "exp_avg", "exp_avg_sq")
ALIGNED = 16


def whole_state() -> dict[str, dict[str, torch.Tensor]]:
    """Every parameter's state, whole: no two elements are the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (WIDTH,), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    return {
        f"layers.{layer}.{name}": {key: torch.rand(shape, generator=generator) for key in KEYS}
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }


def buckets(
    whole: dict[str, dict[str, torch.Tensor]], tensor: int, data: int, pipeline: int
) -> Iterator[tuple[list[FlatBucket], list[dict[str, torch.Tensor]]]]:
    """The buckets of each rank, two of them, and what they hold; the order of ranks is tensor, data, pipeline."""
    for stage in range(pipeline):
        names = [name for name in whole if int(name.split(".")[1]) * pipeline // LAYERS == stage]
        middle = len(names) // 2
        for place in range(data):
            for part in range(tensor):
                made = [
                    shard(whole, names[a:b], (part, tensor), (place, data)) for a, b in ((0, middle), (middle, None))
                ]
                yield [one for one, _ in made], [held for _, held in made]


def shard(
    whole: dict[str, dict[str, torch.Tensor]], names: list[str], at: tuple[int, int], of: tuple[int, int]
) -> tuple[FlatBucket, dict[str, torch.Tensor]]:
    """One rank's share of a bucket; ``at``: its number among the tensor-parallel ranks; ``of``: among the others."""
    parameters, locals_, end = [], [], 0
    for name in names:
        shape = whole[name]["master"].shape
        dimension = {"up": 0, "down": 1}.get(name.split(".")[-1])
        local = list(shape)
        start = [0] * len(shape)
        if dimension is not None:
            local[dimension] //= at[1]
            start[dimension] = local[dimension] * at[0]
        parameters.append(BucketParameter(name, end, local, shape, start, at[0] if dimension is None else 0))
        locals_.append(tuple(slice(first, first + length) for first, length in zip(start, local, strict=True)))
        end += -(-prod(local) // ALIGNED) * ALIGNED
    share = -(-end // of[1])
    held = {}
    for key in KEYS:
        flat = torch.full((share * of[1],), -1.0)
        for name, parameter, box in zip(names, parameters, locals_, strict=True):
            flat[parameter.first : parameter.first + prod(parameter.shape)] = whole[name][key][box].flatten()
        held[key] = flat[share * of[0] :][:share].clone()
    return FlatBucket(held, share * of[0], parameters), held


def states(layout: tuple[int, int, int], save_as: str, fill: bool = True) -> list[tuple[dict[str, Any], Any]]:
    """The state of each rank, and what it must hold."""
    made = []
    for own, held in buckets(whole_state(), *layout):
        wanted = [{key: tensor.clone() for key, tensor in one.items()} for one in held]
        for tensor in (tensor for one in held if not fill for tensor in one.values()):
            tensor[tensor >= 0] = 0.5  # but not the padding
        made.append(({"optimizer": optimizer_layouts(own, save_as), "step": 7 if fill else 0}, (held, wanted)))
    return made


def check_restored(directory: Path, layout: tuple[int, int, int]) -> None:
    made = states(layout, FULLY_RESHARDABLE, fill=False)
    for number, (state, (held, wanted)) in enumerate(made):
        found = rank(directory, number, len(made)).restore(state)
        assert found is not None and found[1] is state and state["step"] == 7
        for one, other in zip(held, wanted, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in KEYS), (layout, number)


OTHERS = [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 3, 1), (1, 1, 4), (1, 1, 1)]


@pytest.mark.parametrize("layout", [(4, 1, 1), (1, 2, 2), *(pytest.param(one, marks=slow) for one in OTHERS)])
def test_saved_by_parameter_any_layout_restores(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    save(tmp_path, [state for state, _ in states((2, 2, 1), FULLY_RESHARDABLE)])
    check_restored(tmp_path, layout)


@pytest.mark.parametrize("data", [3, *(pytest.param(one, marks=slow) for one in (1, 2, 4, 5))])
def test_saved_as_they_lie_any_number_of_data_parallel_ranks_restores(tmp_path: Path, data: int) -> None:
    save(tmp_path, [state for state, _ in states((2, 2, 2), DP_RESHARDABLE)])
    check_restored(tmp_path, (2, data, 2))


@pytest.mark.parametrize("layout", [(4, 1, 1), *(pytest.param(one, marks=slow) for one in ((1, 4, 1), (1, 2, 2)))])
def test_saved_as_they_lie_another_layout_is_refused(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    save(tmp_path, [state for state, _ in states((2, 2, 1), DP_RESHARDABLE)])
    for number, (state, (held, _)) in enumerate(states(layout, FULLY_RESHARDABLE, fill=False)):
        with pytest.raises(LayoutMismatch, match="saved as dp_reshardable: tensor and pipeline parallel layouts"):
            rank(tmp_path, number, 4).restore(state)
        assert state["step"] == 0 and all(set(one.unique().tolist()) <= {-1.0, 0.5} for one in held[0].values())


def test_each_step_of_a_run_may_have_its_own_layout(tmp_path: Path) -> None:
    for step, save_as in ((10, DP_RESHARDABLE), (20, FULLY_RESHARDABLE), (30, DP_RESHARDABLE)):
        save(tmp_path, [state for state, _ in states((2, 2, 1), save_as)], step, keep_last=5)
    for step in (10, 20, 30):
        for number, (state, (held, wanted)) in enumerate(states((2, 2, 1), DP_RESHARDABLE, fill=False)):
            assert rank(tmp_path, number, 4).restore(state, step=step) is not None
            assert all(torch.equal(held[0][key], wanted[0][key]) for key in KEYS), (step, number)


def test_ranks_whose_parameters_are_copies_write_nothing(tmp_path: Path) -> None:
    """A bucket of norms alone is the same in all tensor-parallel ranks."""
    value = torch.rand(WIDTH)
    made = [
        optimizer_layouts(
            [FlatBucket({"exp_avg": value.clone()}, 0, [BucketParameter("norm", 0, (WIDTH,), replica=part)])], save_as
        )
        for save_as in (DP_RESHARDABLE,)
        for part in range(2)
    ]
    save(tmp_path, [{"optimizer": one} for one in made])
    manifest = checkpoint_index.manifest_of(tmp_path, 1)
    assert manifest.shards[1].size_bytes < manifest.shards[0].size_bytes


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        (
            "before the parameter in front",
            {"parameters": [BucketParameter("a", 0, (4,)), BucketParameter("b", 3, (4,))]},
        ),
        ("no parameters", {"parameters": []}),
        ("one dimension and one length", {"tensors": {"a": torch.zeros(4), "b": torch.zeros(5)}}),
        ("number of an element", {"first": -1}),
    ],
)
def test_buckets_that_contradict_themselves_are_refused(words: str, bucket: dict[str, Any]) -> None:
    usual = {"tensors": {"a": torch.zeros(8)}, "first": 0, "parameters": [BucketParameter("a", 0, (8,))]}
    with pytest.raises(UsageError, match=words):
        optimizer_layouts([FlatBucket(**{**usual, **bucket})])


def test_a_layout_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layout 'c', but a, b"):
        AnyLayout({"a": {}, "b": {}}, "c")
    value = Slab(torch.ones(2), (2,), (0,))
    save(tmp_path, [{"optimizer": {"value": value}}])
    with pytest.raises(LayoutMismatch, match="one of the layouts a, b, and the checkpoint none of them"):
        rank(tmp_path, 0, 1).restore({"optimizer": AnyLayout({"a": {"value": value}, "b": {}}, "a")})
