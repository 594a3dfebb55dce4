"""Verification of committed steps: it finds every bit that flips in a file, and says where."""

from __future__ import annotations

import os
import random
from pathlib import Path

import h5py
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc import ckpt
from resilio_hpc.ckpt.format.extents import gaps
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.verify import Damage, verify_step

STATE = {"w": torch.arange(30_000.0), "half": torch.ones(5, dtype=torch.bfloat16), "empty": torch.ones(0), "n": 7}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    ckpt.Checkpointer(tmp_path).save(3, STATE).wait(timeout_s=30)
    return tmp_path


def shard(directory: Path) -> Path:
    return directory / "step-0000000003" / "node-0.h5"


def found(directory: Path) -> list[Damage]:
    return verify_step(directory, checkpoint_index.manifest_of(directory, 3))


def test_a_good_step_is_read_whole(directory: Path) -> None:
    read: list[int] = []
    assert verify_step(directory, checkpoint_index.manifest_of(directory, 3), read.append) == []
    assert sum(read) == 30_000 * 4 + 10


def test_whatever_bit_of_the_file_flips_it_is_found(directory: Path) -> None:
    size, draw = shard(directory).stat().st_size, random.Random(5)
    with h5py.File(shard(directory)) as file:
        data = range(file["rank0/w"].id.get_offset(), file["rank0/w"].id.get_offset() + 120_000)
    fd = os.open(shard(directory), os.O_RDWR)
    places = [at for at in range(size) if at not in data]
    for at in draw.sample(places, min(1500, len(places))) + draw.sample(data, 100):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 1 << draw.randrange(8)]), at)
        (damage,) = found(directory)
        assert (damage.tensor == "w") == (at in data)
        os.pwrite(fd, byte, at)
    os.close(fd)
    assert found(directory) == []


def test_the_damage_is_named(directory: Path) -> None:
    with h5py.File(shard(directory)) as file:
        at = file["rank0/w"].id.get_offset()
    with shard(directory).open("r+b") as file:
        file.seek(at + 5)
        file.write(b"\xff")
    (damage,) = found(directory)
    assert (damage.file, damage.rank, damage.tensor, damage.offset) == ("node-0.h5", 0, "w", at)
    assert damage.what == f"rank 0: tensor w does not match its checksum at byte {at}"


def test_files_that_are_gone_or_short_are_damage_and_links_are_followed(directory: Path, tmp_path: Path) -> None:
    data = shard(directory).read_bytes()
    os.truncate(shard(directory), len(data) - 1)
    assert "does not have" in found(directory)[0].what
    shard(directory).rename(tmp_path / "elsewhere")
    assert "is missing" in found(directory)[0].what
    (tmp_path / "elsewhere").write_bytes(data)
    shard(directory).symlink_to(tmp_path / "elsewhere")
    assert found(directory) == []


def test_more_blocks_than_there_is_room_for_are_read_in_turns(directory: Path) -> None:
    with h5py.File(shard(directory)) as file:
        at = file["rank0/w"].id.get_offset()
    with shard(directory).open("r+b") as file:
        for place in (at, at + 70_000, at + 119_999):
            file.seek(place)
            file.write(b"\xff")
    read: list[int] = []
    damages = verify_step(directory, checkpoint_index.manifest_of(directory, 3), read.append, room_bytes=120_000)
    assert [damage.tensor for damage in damages] == ["w"]
    assert len(read) > 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))), st.integers(0, 70))
def test_gaps_are_what_no_extent_covers(extents: list[tuple[int, int]], size: int) -> None:
    free = set(range(size)) - {at for offset, length in extents for at in range(offset, offset + length)}
    found = [at for offset, length in gaps(extents, size) for at in range(offset, offset + length)]
    assert found == sorted(free)
