"""Saved in one layout, restored in another: every element where it belongs, none of them unverified or made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.format.manifest import Extent, read_manifest, read_table, sha256, write_manifest
from resilio_hpc.ckpt.state.slab import Box, any_overlap
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, LayoutMismatch, UsageError
from resilio_hpc.native import crc32c
from tests.support.ckpt.unchecked_step import save_unchecked

Grid = tuple[int, ...]


def rank(directory: Path, number: int, world: int, **more: Any) -> Checkpointer:
    """The Checkpointer of one of ``world`` processes; all of them live in this one."""
    environment = {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"}
    coordinator.use(LocalCoordinator(directory, environment, Retention()))
    try:
        return Checkpointer(directory, **more)
    finally:
        coordinator.use(None)


def boxes(shape: Grid, grid: Grid) -> Iterator[Box]:
    """``shape`` cut into a grid, as evenly as it goes; some may be empty."""
    cuts = [
        [(length * number // parts, length * (number + 1) // parts) for number in range(parts)]
        for length, parts in zip(shape, grid, strict=True)
    ]
    for ranges in product(*cuts):
        yield Box(tuple(first for first, _ in ranges), tuple(end - first for first, end in ranges))


def cut(whole: Any, box: Box) -> Any:
    return whole[tuple(slice(first, first + length) for first, length in zip(box.start, box.shape, strict=True))]


def save(directory: Path, states: list[dict[str, Any]], step: int = 1, **more: Any) -> None:
    ranks = [rank(directory, number, len(states), **more) for number in range(len(states))]
    handles = [one.save(step, state) for one, state in zip(ranks, states, strict=True)]
    failed = []
    for handle in handles:
        try:
            handle.wait("committed", 60)
        except CheckpointError as error:  # all of them report it, or a later test would find that in its output
            failed.append(error)
    if failed:
        raise failed[0]


@pytest.mark.parametrize(
    ("shape", "saved", "wanted"),
    [
        ((64, 48), (4, 1), (3, 1)),
        ((64, 48), (2, 2), (4, 1)),
        ((64, 48), (2, 2), (1, 4)),
        ((64, 48), (1, 1), (2, 3)),
        ((64, 48), (8, 1), (1, 1)),
        ((7, 5, 3), (2, 1, 3), (3, 5, 1)),
        ((2, 9), (4, 1), (1, 4)),  # some processes hold nothing
        ((1000,), (3,), (7,)),
    ],
)
def test_any_grid_can_be_restored_as_any_other(shape: Grid, saved: Grid, wanted: Grid, tmp_path: Path) -> None:
    whole = np.random.default_rng(1).random(shape)
    save(tmp_path, [{"x": Slab(cut(whole, box).copy(), shape, box.start), "step": 1} for box in boxes(shape, saved)])
    asked = list(boxes(shape, wanted))
    for number, box in enumerate(asked):
        mine = np.full(box.shape, -1.0)
        found = rank(tmp_path, number, len(asked)).restore({"x": Slab(mine, shape, box.start), "step": 0})
        assert found is not None
        assert found[1]["step"] == 1
        assert np.array_equal(mine, cut(whole, box))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool])
def test_every_width_of_element_is_copied_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(6 * 8 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    whole = raw.view(dtype).reshape(6, 8)
    save(tmp_path, [{"x": Slab(whole[:, :3].contiguous(), (6, 8), (0, 0))},
                    {"x": Slab(whole[:, 3:].contiguous(), (6, 8), (0, 3))}])  # fmt: skip
    for number in range(3):
        mine = torch.zeros(2, 8, dtype=dtype)
        rank(tmp_path, number, 3).restore({"x": Slab(mine, (6, 8), (2 * number, 0))})
        assert torch.equal(mine.view(torch.uint8), whole[2 * number : 2 * number + 2].contiguous().view(torch.uint8))


def test_a_plain_tensor_takes_all_of_it_and_a_strided_one_too(tmp_path: Path) -> None:
    whole = torch.rand(6, 4)
    save(tmp_path, [{"x": Slab(whole[:4].clone(), (6, 4), (0, 0))}, {"x": Slab(whole[4:].clone(), (6, 4), (4, 0))}])
    mine, strided = torch.zeros(6, 4), torch.zeros(4, 6).t()
    rank(tmp_path, 0, 1).restore({"x": mine})
    rank(tmp_path, 0, 1).restore({"x": strided})
    assert torch.equal(mine, whole)
    assert torch.equal(strided, whole)


def test_of_copies_only_one_goes_to_disk_and_all_come_back(tmp_path: Path) -> None:
    """Two groups of two: data parallel over model parallel, as HSDP lays it out."""
    whole = torch.rand(4, 3)
    scale = torch.tensor(2.5)
    states = [
        {
            "x": Slab(cut(whole, box).clone(), (4, 3), box.start, replica),
            "scale": Slab(scale, (), (), 2 * replica + half),
        }
        for replica in (0, 1)
        for half, box in enumerate(boxes((4, 3), (2, 1)))
    ]
    save(tmp_path, states)
    held = []
    for number in range(4):
        with h5py.File(tmp_path / "step-0000000001" / f"node-{number}.h5") as file:
            held.append([name for name in file[f"rank{number}"] if not name.startswith("$")])
            if "x" in held[-1]:
                dataset = file[f"rank{number}/x"]
                assert (list(dataset.attrs["global_shape"]), list(dataset.attrs["start"])) == ([4, 3], [2 * number, 0])
    assert held == [["scale", "x"], ["x"], [], []]
    for world in (3, 4):
        for number in range(world):
            mine, size = torch.zeros(4, 3), torch.tensor(0.0)
            rank(tmp_path, number, world).restore({"x": mine, "scale": Slab(size, (), ())})
            assert torch.equal(mine, whole)
            assert size == 2.5


def test_the_same_layout_comes_back_without_a_state_as_slabs(tmp_path: Path) -> None:
    halves = [torch.rand(2, 3), torch.rand(1, 3)]
    save(tmp_path, [{"x": Slab(half, (3, 3), (2 * number, 0))} for number, half in enumerate(halves)])
    for number, half in enumerate(halves):
        _, state = rank(tmp_path, number, 2).restore() or (0, {})
        slab = state["x"]
        assert (slab.global_shape, slab.start, slab.replica) == ((3, 3), (2 * number, 0), 0)
        assert torch.equal(slab.tensor, half)
    with pytest.raises(LayoutMismatch, match=r"state\['x'\]: saved in parts by others"):
        rank(tmp_path, 0, 3).restore()


def stages(layers: int, count: int, values: bool = True) -> list[dict[str, Any]]:
    """A model of ``layers`` whose layers are shared out over ``count`` pipeline stages, as by name."""
    made: list[dict[str, Any]] = []
    for box in boxes((layers,), (count,)):
        state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": 5}
        for number in range(box.start[0], box.start[0] + box.shape[0]):
            for part, name in (("model", f"layer.{number}"), ("optimizer", f"state.layer.{number}.exp_avg")):
                value = torch.full((3, 2), float(number)) if values else torch.zeros(3, 2)
                state[part][name] = Slab(value, (3, 2), (0, 0))
            state["optimizer"][f"state.layer.{number}.step"] = torch.tensor(5.0 if values else 0.0)
            state["optimizer"][f"groups.layer.{number}.lr"] = 0.5 if values else 0.0
        made.append(state)
    return made


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1), (1, 3), (3, 2), (2, 2)])
def test_layers_can_be_shared_out_over_other_pipeline_stages(before: int, after: int, tmp_path: Path) -> None:
    save(tmp_path, stages(7, before))
    for number, (mine, expected) in enumerate(zip(stages(7, after, False), stages(7, after), strict=True)):
        _, found = rank(tmp_path, number, after).restore(mine) or (0, {})
        assert found.keys() == expected.keys()
        for part in ("model", "optimizer"):
            assert found[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                same = found[part][name]
                if isinstance(value, Slab):
                    assert torch.equal(same.tensor, value.tensor), name
                else:
                    assert same == value, name


def test_a_layer_that_nobody_saved_is_refused(tmp_path: Path) -> None:
    save(tmp_path, stages(3, 2))
    (mine,) = stages(4, 1, False)
    with pytest.raises(
        LayoutMismatch, match=r"state\['model'\]\['layer.3'\]: the state has it, the checkpoint does not"
    ):
        rank(tmp_path, 0, 1).restore(mine)


class Stage(torch.nn.Module):
    """Some layers of a model, which go to disk as parts of it."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = layers
        self.values = {number: torch.zeros(3) + number for number in layers}

    def state_dict(self) -> dict[str, Slab]:  # type: ignore[override]
        return {f"{number}": Slab(value, (3,), (0,)) for number, value in self.values.items()}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        assert state.keys() == self.state_dict().keys()


def test_a_module_may_get_other_layers_and_an_optimizer_by_number_may_not(tmp_path: Path) -> None:
    save(tmp_path, [{"model": Stage(range(2))}, {"model": Stage(range(2, 5))}])
    for number, layers in enumerate((range(3), range(3, 5))):
        stage = Stage(layers)
        for value in stage.values.values():
            value.zero_()
        rank(tmp_path, number, 2).restore({"model": stage})
        assert [value[0] for value in stage.values.values()] == list(layers)

    def with_optimizer(layers: range) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        weight.grad = torch.ones(3)
        optimizer.step()
        return {"model": Stage(layers), "optimizer": optimizer}

    save(tmp_path, [with_optimizer(range(2)), with_optimizer(range(2, 5))], step=2)
    assert rank(tmp_path, 0, 2).restore(with_optimizer(range(2))) is not None
    with pytest.raises(LayoutMismatch, match=r"state\['optimizer'\]: layers are on other ranks now"):
        rank(tmp_path, 0, 2).restore(with_optimizer(range(3)))
    with pytest.raises(LayoutMismatch, match=r"state\['optimizer'\]: layers are on other ranks now"):
        rank(tmp_path, 1, 2).restore(with_optimizer(range(3, 5)))


def test_a_replicated_tensor_can_be_restored_in_parts(tmp_path: Path) -> None:
    whole = torch.rand(5, 3)
    save(tmp_path, [{"x": whole}, {"x": whole}], layout=REPLICATED)
    mine = torch.zeros(2, 3)
    rank(tmp_path, 1, 3, layout=REPLICATED).restore({"x": Slab(mine, (5, 3), (3, 0))})
    assert torch.equal(mine, whole[3:])


def test_what_differs_between_the_processes_cannot_be_shared_out_and_what_does_not_can(tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        part = Slab(torch.ones(2), (4,), (2 * number,))
        return {"x": part, "step": torch.tensor(7.0), "mine": torch.ones(3) * number}

    save(tmp_path, [state(number) for number in range(2)])
    witness, step = torch.zeros(4), torch.tensor(0.0)
    with pytest.raises(LayoutMismatch, match=r"state\['mine'\]: the processes that saved this tensor had others each"):
        rank(tmp_path, 0, 1).restore({"x": witness, "step": step, "mine": torch.zeros(3)})
    assert torch.equal(witness, torch.zeros(4))
    save(tmp_path, [state(0), state(0) | {"x": state(1)["x"]}], step=2)
    assert rank(tmp_path, 4, 5).restore({"x": witness, "step": step, "mine": torch.zeros(3)}) is not None
    assert torch.equal(witness, torch.ones(4))
    assert step == 7


def test_the_same_path_as_a_part_and_as_a_whole_is_refused(tmp_path: Path) -> None:
    save_unchecked(tmp_path, [{"x": Slab(torch.ones(2), (4,), (0,))}, {"x": torch.ones(4)}])
    with pytest.raises(LayoutMismatch, match="x was saved in parts, and as a whole"):
        rank(tmp_path, 0, 1).restore({"x": torch.zeros(4)})


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([(0, 2), (3, 1)], LayoutMismatch, "holds 3 of the 4 elements of x that are wanted"),
        ([(0, 3), (2, 2)], CorruptCheckpoint, "the parts of x that two ranks saved overlap"),
        ([(0, 2), (1, 2)], CorruptCheckpoint, "the parts of x that two ranks saved overlap"),
    ],
)
def test_gaps_and_overlaps_are_found(
    parts: list[tuple[int, int]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    save_unchecked(tmp_path, [{"x": Slab(torch.ones(length), (4,), (first,))} for first, length in parts])
    with pytest.raises(error, match=message):
        rank(tmp_path, 0, 1).restore({"x": torch.zeros(4)})


def test_copies_that_nobody_called_copies_must_be_equal(tmp_path: Path) -> None:
    """As FSDP over tensor parallelism saves what only FSDP has cut: its mesh does not know of the other dimension."""
    save(tmp_path, [{"x": Slab(torch.ones(2), (4,), (first,))} for first in (0, 2, 2)])
    mine = torch.zeros(4)
    rank(tmp_path, 0, 1).restore({"x": mine})
    assert torch.equal(mine, torch.ones(4))
    differ = [{"x": Slab(torch.ones(2) * number, (4,), (first,))} for number, first in enumerate((0, 2, 2))]
    save_unchecked(tmp_path / "other", differ)
    with pytest.raises(CorruptCheckpoint, match="two ranks saved the same part of x differently"):
        rank(tmp_path / "other", 0, 1).restore({"x": torch.zeros(4)}, step=1)


def test_another_global_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [{"x": Slab(torch.ones(2), (4,), (2 * number,))} for number in range(2)])
    with pytest.raises(LayoutMismatch, match=r"the checkpoint holds shape \[4\], the state \[5\]"):
        rank(tmp_path, 0, 1).restore({"x": torch.zeros(5)})
    with pytest.raises(LayoutMismatch, match=r"dtype float32, the state float64"):
        rank(tmp_path, 0, 1).restore({"x": torch.zeros(4, dtype=torch.float64)})


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 4))] * 2), max_size=6))
def test_overlaps_are_found_as_by_looking_at_every_pair(parts: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    made = [Box((a, b), (height, width)) for (a, height), (b, width) in parts]
    assert any_overlap(made) == any(one.overlaps(other) for one, other in combinations(made, 2))


def test_a_grid_of_many_parts_is_looked_at_quickly() -> None:
    grid = list(boxes((4096, 4096), (64, 64)))
    pairs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Box, "overlaps", lambda one, other: pairs.append(1))
        assert not any_overlap(grid)
        assert any_overlap([*grid, grid[100]])
    assert pairs == []


@pytest.mark.parametrize(
    ("global_shape", "start", "replica"),
    [((4,), (3,), 0), ((4, 1), (0,), 0), ((4,), (-1,), 0), ((4,), (0,), -1), ((4.0,), (0,), 0)],
)
def test_a_slab_that_cannot_be_is_refused(global_shape: Any, start: Any, replica: int) -> None:
    with pytest.raises(UsageError, match="Slab"):
        Slab(torch.ones(2), global_shape, start, replica)


def test_a_flipped_bit_in_any_part_that_is_read_is_found(tmp_path: Path) -> None:
    whole = torch.rand(40, 30)
    save(tmp_path, [{"x": Slab(cut(whole, box).clone(), (40, 30), box.start)} for box in boxes((40, 30), (1, 2))])
    for number in (0, 1):
        path = tmp_path / "step-0000000001" / f"node-{number}.h5"
        with h5py.File(path) as file:
            at = file[f"rank{number}/x"].id.get_offset() + 1000
        good = path.read_bytes()
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(CorruptCheckpoint, match="tensor x does not match its checksum at byte 0"):
            rank(tmp_path, 0, 1).restore({"x": torch.zeros(40, 30)})
        path.write_bytes(good)


def test_no_flipped_bit_changes_what_another_layout_restores(tmp_path: Path) -> None:
    """In data, tables, trees and HDF5's metadata of each file: all right, or an error."""
    shape, value = (9, 7), np.arange(63.0)
    whole = value.reshape(shape)
    save(tmp_path, [{"x": Slab(cut(whole, box).copy(), shape, box.start)} for box in boxes(shape, (1, 2))])
    checkpoint, found = rank(tmp_path, 0, 1), 0
    for path in sorted((tmp_path / "step-0000000001").glob("*.h5")):
        good = path.read_bytes()
        fd = os.open(path, os.O_RDWR)
        for at in range(0, len(good), 11):
            os.pwrite(fd, bytes([good[at] ^ 1 << at % 8]), at)
            mine = np.zeros(shape)
            try:
                checkpoint.restore({"x": mine}, step=1)
                assert np.array_equal(mine, whole), f"byte {at} of {path.name}"
            except CorruptCheckpoint:
                found += 1
            os.pwrite(fd, good[at : at + 1], at)
        os.close(fd)
    assert found >= 63 * 8 // 11 - 2  # every one in the data, at least


def test_a_table_with_a_part_that_has_too_few_bytes_for_its_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [{"x": Slab(np.ones(4), (8,), (first,))} for first in (0, 4)])
    step = tmp_path / "step-0000000001"
    manifest = read_manifest((step / "manifest.json").read_bytes(), 1)
    shard = manifest.shards[1]
    at = shard.ranks[0].table
    with (step / shard.file).open("r+b") as file:
        data = os.pread(file.fileno(), at.size_bytes, at.offset)
        table = read_table(data, shard.size_bytes)
        record = msgspec.structs.replace(table.tensors[0], size_bytes=0, checksums=())
        hostile = msgspec.json.encode(msgspec.structs.replace(table, tensors=(record,)))
        file.seek(0, os.SEEK_END)
        file.write(hostile)
    extent = Extent(shard.size_bytes, len(hostile), crc32c(hostile))
    ranks = (msgspec.structs.replace(shard.ranks[0], table=extent, table_sha256=sha256(hostile)),)
    shard = msgspec.structs.replace(shard, size_bytes=shard.size_bytes + len(hostile), ranks=ranks)
    manifest = msgspec.structs.replace(manifest, shards=(manifest.shards[0], shard))
    (step / "manifest.json").write_bytes(write_manifest(manifest))
    with pytest.raises(CorruptCheckpoint, match="does not have 0 bytes"):
        rank(tmp_path, 0, 1).restore({"x": np.zeros(8)}, step=1)


def test_many_threads_read_many_slabs(tmp_path: Path) -> None:
    whole = {f"x{number}": torch.rand(300, 500) for number in range(20)}
    parts = list(boxes((300, 500), (1, 4)))
    save(tmp_path, [{name: Slab(cut(value, box).clone(), (300, 500), box.start) for name, value in whole.items()}
                    for box in parts])  # fmt: skip
    mine = {name: torch.zeros(300, 500) for name in whole}
    checkpoint = rank(tmp_path, 0, 1)
    checkpoint._pool = ThreadPoolExecutor(4)
    checkpoint.restore(mine)
    assert all(torch.equal(mine[name], value) for name, value in whole.items())
