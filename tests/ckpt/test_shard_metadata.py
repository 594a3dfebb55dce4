"""The HDF5 metadata of a save is that of the save before where both have the same tensors: nobody can tell from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.format import shard_metadata
from resilio_hpc.ckpt.format.manifest import RankTable, TensorRecord
from resilio_hpc.ckpt.format.shard_metadata import HdfImage, RankPart
from resilio_hpc.ckpt.store.posix import PosixNewFile
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    shard_metadata._kept.clear()
    yield
    shard_metadata._kept.clear()


def part(step: int, tree: bytes, checksum: int, rows: int = 1000, rank: int = 0) -> RankPart:
    tensors = [
        TensorRecord("model/weight", "numpy", "<f4", (rows, 100), 4096, 400 * rows, (checksum,)),
        TensorRecord("model/none", "numpy", "<f4", (0, 5), 4096, 0, ()),
        TensorRecord("step", "numpy", "<i8", (), 64, 8, (checksum,)),
    ]
    return RankPart(step, rank, "own", tree, tensors)


def made(parts: list[RankPart], path: Path) -> tuple[bytes, HdfImage, str]:
    """The bytes of the file, with the trees and tables in it, the image, and the hash of its metadata."""
    with HdfImage(parts) as image, path.open("w+b") as file:
        metadata = image.write(PosixNewFile(file.fileno()))
        for place in (place for places in image.places for place in places if place.data is not None):
            os.pwrite(file.fileno(), place.data or b"", place.offset)
        return path.read_bytes(), image, metadata


def test_a_later_save_has_the_metadata_that_it_would_have_alone(tmp_path: Path) -> None:
    later = [part(1000, b'{"loss": 7}', 7), part(1000, b"[]", 3, rank=1)]
    first = [replace(one, step=9) for one in later]
    made(first, tmp_path / "first")
    (kept,) = shard_metadata._kept
    from_kept = made(later, tmp_path / "later")
    assert shard_metadata._kept == [kept]
    shard_metadata._kept.clear()
    alone = made(later, tmp_path / "alone")
    assert from_kept[0] == alone[0]
    assert from_kept[1].places == alone[1].places
    assert from_kept[1].ranks == alone[1].ranks
    assert from_kept[2] == alone[2]


def test_numbers_may_have_more_digits_in_a_later_save(tmp_path: Path) -> None:
    made([part(9, b'{"loss": 1}', 1)], tmp_path / "first")
    (kept,) = shard_metadata._kept
    made([part(1000, b'{"loss": 0.123456789}', 4294967295)], tmp_path / "later")
    assert shard_metadata._kept == [kept]
    with h5py.File(tmp_path / "later") as file:
        assert file.attrs["step"] == 1000
        assert bytes(file["rank0/$tree"][()]).rstrip(b" ") == b'{"loss": 0.123456789}'
        (weight, *_) = msgspec.json.decode(bytes(file["rank0/$table"][()]), type=RankTable).tensors
        assert weight.offset == file["rank0/model/weight"].id.get_offset()
        assert weight.checksums == (4294967295,)


@pytest.mark.parametrize(
    "other",
    [
        part(2, b"{}", 1, rows=1001),
        part(2, b"{}", 1, rank=1),
        replace(part(2, b"{}", 1), layout="replicated"),
        replace(part(2, b"{}", 1), tensors=part(2, b"{}", 1).tensors[:2]),
        part(2, b"[" + b"1," * 5000 + b"1]", 1),
    ],
    ids=["another shape", "another rank", "another layout", "a tensor less", "a tree that has no room"],
)
def test_what_does_not_fit_gets_metadata_of_its_own(other: RankPart, tmp_path: Path) -> None:
    made([part(1, b"{}", 1)], tmp_path / "first")
    (kept,) = shard_metadata._kept
    after = made([other], tmp_path / "after")
    assert shard_metadata._kept != [kept]
    shard_metadata._kept.clear()
    alone = made([other], tmp_path / "alone")
    assert (after[0], after[1].places, after[1].ranks) == (alone[0], alone[1].places, alone[1].ranks)


def test_what_is_in_use_serves_nobody_else(tmp_path: Path) -> None:
    made([part(1, b"{}", 1)], tmp_path / "first")
    with HdfImage([part(2, b"{}", 1)]) as one, HdfImage([part(3, b"{}", 1)]) as other:
        assert one._fd != other._fd
        for image, step in ((one, 2), (other, 3)):
            with (tmp_path / f"{step}").open("w+b") as file:
                image.write(PosixNewFile(file.fileno()))
            with h5py.File(tmp_path / f"{step}") as written:
                assert written.attrs["step"] == step


def test_a_forked_child_leaves_its_parents_alone(tmp_path: Path) -> None:
    made([part(1, b"{}", 1)], tmp_path / "first")
    child = os.fork()
    if child == 0:
        os._exit(len(shard_metadata._kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(shard_metadata._kept) == 1


def test_each_step_of_a_run_is_whole_and_says_which_it_is(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, keep_last=5)
    weights = np.arange(50_000, dtype=np.float64)
    history: list[float] = []
    for step in (1, 20, 300, 4000):
        history += [step / 7] * 200  # its tree has no room at some step
        checkpoint.save(step, {"weights": weights * step, "history": history}).wait(timeout_s=WAIT_S)
    assert resilio_ckpt(["verify", str(tmp_path)]) == 0
    for step in (1, 20, 300, 4000):
        with h5py.File(tmp_path / f"step-{step:010d}" / "node-0.h5") as file:
            assert file.attrs["step"] == step
            assert np.array_equal(file["rank0/weights"][()], weights * step)
