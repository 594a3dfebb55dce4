"""Boxes of tensors out of files of many blocks, and tables that name impossible ones."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.ckpt.format import bulk_io, manifest
from resilio_hpc.ckpt.format.bulk_io import BoxSegment
from resilio_hpc.ckpt.format.manifest import Extent, RankTable, SlabRecord, TensorRecord, read_table
from resilio_hpc.ckpt.restore import slab_reader
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks
from resilio_hpc.ckpt.restore.slab_reader import Part, read_part, read_parts
from resilio_hpc.ckpt.state.slab import Box
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c
from tests.support.ckpt.opened import opened


def cut(whole: Any, box: Box) -> Any:
    return whole[tuple(slice(first, first + length) for first, length in zip(box.start, box.shape, strict=True))]


@pytest.mark.parametrize(
    ("global_shape", "start"),
    [((4,), (3,)), ((4, 1), (0, 0)), ((4,), ()), ((), ()), ((1,), (0,)), ((1 << 61,), (1 << 61,))],
)
def test_a_table_with_an_impossible_part_is_refused(global_shape: Any, start: Any) -> None:
    record = TensorRecord("x", "torch", "float32", (2,), 0, 8, (1,), SlabRecord(global_shape, start))
    table = msgspec.json.encode(RankTable(Extent(0, 0, 0), (record,)))
    with pytest.raises(CorruptCheckpoint, match="tensor x lies outside of the tensor that it is a part of"):
        read_table(table, 100)


def test_a_table_from_before_there_were_parts_can_be_read() -> None:
    record = ["x", "torch", "float32", [2], 0, 8, [1]]
    table = msgspec.json.encode({"tree": {"offset": 0, "size_bytes": 0, "crc32c": 0}, "tensors": [record]})
    assert read_table(table, 100).tensors == (TensorRecord("x", "torch", "float32", (2,), 0, 8, (1,)),)


SMALL_BLOCK = 4096


class SmallBlocks(TensorRecord, frozen=True, array_like=True):
    """Blocks of a page: many of them in a small file."""

    @property
    def block_bytes(self) -> int:
        return SMALL_BLOCK


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_box_of_any_shape_is_read_right(data: st.DataObject) -> None:
    with (
        ThreadPoolExecutor(2) as pool,
        closing(SharedBlocks(f"test-{os.getpid()}", small_bytes=0)) as blocks,
    ):
        shared = data.draw(st.sampled_from([None, blocks]))
        shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
        item = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
        direct = data.draw(st.sampled_from([True, False, None]))
        local_rank = data.draw(st.integers(0, 70))
        share_bytes = data.draw(st.sampled_from([1, 8192, 64 << 20]))
        first = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
        size = tuple(data.draw(st.integers(1, length - at)) for length, at in zip(shape, first, strict=True))
        room = tuple(length + data.draw(st.integers(0, 2)) for length in size)
        to = tuple(data.draw(st.integers(0, space - length)) for space, length in zip(room, size, strict=True))
        whole = np.frombuffer(os.urandom(int(np.prod(shape)) * item), dtype=f"V{item}").reshape(shape)
        target = np.zeros(room, dtype=f"V{item}")
        file = os.memfd_create("tensor")
        try:
            os.write(file, b"x" * 100 + whole.tobytes())
            memory = memoryview(target.reshape(-1).view("u1"))
            read_parts(
                1,
                [Part(opened(file), record_of(whole, 100), Box(first, size), memory, room, to)],
                direct,
                pool,
                local_rank,
                shared,
                share_bytes=share_bytes,
            )
        finally:
            os.close(file)
        expected = np.zeros(room, dtype=f"V{item}")
        cut(expected, Box(to, size))[...] = cut(whole, Box(first, size))
        assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("first", "width", "room"), [(0, 1024, 1024), (256, 256, 256), (4, 260, 264), (3, 257, 257), (1, 500, 509)]
)
@pytest.mark.parametrize("shift", [0, 4, 16])
def test_long_runs_go_to_their_places_however_they_lie(
    first: int, width: int, room: int, shift: int, disk_path: Path
) -> None:
    """Which are copied past the caches where that goes."""
    whole = np.random.default_rng(3).random((400, 1300), dtype=np.float32)
    (disk_path / "tensor").write_bytes(whole.tobytes())
    memory = np.zeros(shift // 4 + 400 * room, dtype=np.float32)
    target = memory[shift // 4 :].reshape(400, room)
    box = Box((5, first), (390, width))
    expected = np.zeros_like(target)
    expected[7:397, :width] = cut(whole, box)
    with (
        (disk_path / "tensor").open("rb") as file,
        ThreadPoolExecutor(2) as pool,
        closing(SharedBlocks(f"test-{os.getpid()}")) as shared,
    ):
        record = record_of(whole, 0, manifest.BLOCK_BYTES)
        part = Part(opened(file.fileno()), record, box, memoryview(target.reshape(-1)).cast("B"), (400, room), (7, 0))
        for direct, blocks in ((True, None), (False, None), (False, shared)):
            target[:] = 0
            read_parts(1, [part], direct, pool, 0, blocks)
            assert np.array_equal(target, expected)


def record_of(whole: np.ndarray[Any, Any], offset: int, block: int = SMALL_BLOCK) -> TensorRecord:
    data = whole.tobytes()
    checksums = tuple(crc32c(data[at : at + block]) for at in range(0, len(data), block))
    kind = SmallBlocks if block == SMALL_BLOCK else TensorRecord
    return kind("x", "numpy", whole.dtype.str, whole.shape, offset, len(data), checksums)


def test_only_the_blocks_that_are_touched_are_read_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.arange(64 * 256, dtype=np.float64).reshape(64, 256)  # two rows a block
    asked: list[int] = []
    read = slab_reader.bulk_io.read

    def counted(fd: int, segments: Any, direct: bool) -> list[int]:
        asked.extend(segment.offset // SMALL_BLOCK for segment in segments)
        return read(fd, segments, direct)

    monkeypatch.setattr(slab_reader.bulk_io, "read", counted)
    file = os.memfd_create("tensor")
    os.write(file, whole.tobytes())
    target = np.zeros((10, 3))
    box = Box((11, 100), (10, 3))
    read_part(1, Part(opened(file), record_of(whole, 0), box, memoryview(target).cast("B"), (10, 3), (0, 0)))
    os.close(file)
    assert np.array_equal(target, cut(whole, box))
    assert asked == [5, 6, 7, 8, 9, 10]


def test_neighbours_share_columns_and_the_edges_of_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.arange(64 * 256, dtype=np.float64).reshape(64, 256)  # two rows a block
    asked: list[tuple[int, bool]] = []
    read = slab_reader.bulk_io.read

    def noted(fd: int, segments: Any, direct: bool) -> list[int]:
        asked.extend((segment.offset // SMALL_BLOCK, direct) for segment in segments)
        return read(fd, segments, direct)

    monkeypatch.setattr(slab_reader.bulk_io, "read", noted)
    file = os.memfd_create("tensor")
    os.write(file, whole.tobytes())

    def found(box: Box) -> list[tuple[int, bool]]:
        asked.clear()
        target = np.zeros(box.shape)
        part = Part(opened(file), record_of(whole, 0), box, memoryview(target).cast("B"), box.shape, (0, 0))
        with ThreadPoolExecutor(1) as pool:
            read_parts(1, [part], None, pool)
        assert np.array_equal(target, cut(whole, box))
        return sorted(asked)

    assert found(Box((1, 0), (6, 256))) == [(0, False), (1, True), (2, True), (3, False)]
    assert found(Box((1, 0), (10, 256))) == [(number, True) for number in range(6)]
    assert found(Box((0, 9), (10, 3))) == [(number, False) for number in range(5)]
    os.close(file)


@pytest.mark.parametrize("direct", [True, False])
def test_a_bit_that_flipped_in_a_block_beside_the_box_is_found(direct: bool, disk_path: Path) -> None:
    whole = np.arange(64 * 256, dtype=np.float64).reshape(64, 256)
    part = Part(opened(0), record_of(whole, 0), Box((11, 100), (10, 3)), memoryview(bytearray(240)), (10, 3), (0, 0))
    data = bytearray(whole.tobytes())
    data[12 * 2048 + 8] ^= 4  # the row is the box's, the column is not
    (disk_path / "tensor").write_bytes(data)
    with (
        (disk_path / "tensor").open("rb") as file,
        ThreadPoolExecutor(1) as pool,
        pytest.raises(CorruptCheckpoint, match="x does not match its checksum at byte 24576"),
    ):
        read_parts(1, [part._replace(reader=opened(file.fileno()))], direct, pool)


@pytest.mark.parametrize(
    "strides",
    [
        (0, 0, 8, ((3, 8, 8),)),  # the third run ends behind the target
        (0, 12, 8, ((1, 8, 8),)),
        (0, 0, 8, ((2, 4, 8),)),  # runs that overlap in the file
        (0, 0, 4, ((2, 4, 8), (2, 8, 4))),
        (-1, 0, 8, ((1, 8, 8),)),
        (0, 0, 0, ((1, 8, 8),)),
        (0, 0, 1 << 62, ((1 << 62, 1 << 62, 0),)),
        (0, 0, 8, ()),
        (0, 0, 8, ((1, 8, 8),) * 33),
    ],
)
def test_runs_that_do_not_fit_are_refused(strides: bulk_io.Strides) -> None:
    file = os.memfd_create("tensor")
    try:
        with pytest.raises(ValueError, match="a box "):
            bulk_io.read(file, [BoxSegment(0, memoryview(bytearray(16)), 0, 16, 0, strides)], False)
    finally:
        os.close(file)
