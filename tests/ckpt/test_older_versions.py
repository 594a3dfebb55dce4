"""Steps that older versions wrote (samples, as they were then): everything that is done with a step is done with them.

``version-1.tar.xz``: blocks of 16 MiB. Step 10, of two processes: ``rows``, a slab of 18.4 MB each, and ``scale``; step
20, by way of torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilio_hpc.ckpt import Slab
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.format.bulk_io import size_of
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES, VERSION
from resilio_hpc.ckpt.restore import block_ring
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.cli.ckpt import ckpt
from resilio_hpc.core.errors import CorruptCheckpoint
from tests.ckpt.test_slabs import rank

SAMPLES = Path(__file__).parent / "samples"
ROWS, COLUMNS = 4608, 2000
WHOLE = np.tile(np.arange(1000, dtype=np.float32), ROWS * COLUMNS // 1000).reshape(ROWS, COLUMNS)


@pytest.fixture
def directory(disk_path: Path) -> Path:
    shutil.unpack_archive(SAMPLES / "version-1.tar.xz", disk_path)
    return disk_path / "version-1"


def state_of(number: int, world: int, columns: bool = False) -> dict[str, Any]:
    """Room for an even part of the rows, or columns."""
    axis = int(columns)
    size = WHOLE.shape[axis] // world
    shape = (ROWS, size) if columns else (size, COLUMNS)
    start = (0, number * size) if columns else (number * size, 0)
    rows = Slab(np.zeros(shape, dtype=np.float32), WHOLE.shape, start)
    return {"rows": rows, "scale": torch.zeros(3, 5, dtype=torch.bfloat16), "step": 0}


def is_right(state: dict[str, Any]) -> bool:
    slab = state["rows"]
    (first, left), (rows, columns) = slab.start, slab.tensor.shape
    good = (slab.tensor == WHOLE[first : first + rows, left : left + columns]).all() and (state["scale"] == 0.5).all()
    return bool(good) and state["step"] == 10


def test_they_come_back_as_they_were_saved(directory: Path) -> None:
    for number in range(2):
        state = state_of(number, 2)
        rank(directory, number, 2).restore(state, step=10)
        assert is_right(state)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("world", [1, 4])
def test_they_come_back_in_other_layouts(world: int, columns: bool, directory: Path) -> None:
    for number in range(world):
        state = state_of(number, world, columns)
        rank(directory, number, world).restore(state, step=10)
        assert is_right(state)


def test_blocks_that_no_slot_has_room_for_are_read_beside_the_ring(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several processes of a node."""
    asked: list[int] = []
    in_ring: list[int] = []
    for reader, sizes in ((SharedBlocks, asked), (block_ring.Ring, in_ring)):

        def counted(
            self: Any, fd: int, segments: Any, *more: Any, read: Any = reader.read, sizes: list[int] = sizes
        ) -> list[int]:
            sizes.extend(map(size_of, segments))
            found: list[int] = read(self, fd, segments, *more)
            return found

        monkeypatch.setattr(reader, "read", counted)
    manifest = checkpoint_index.manifest_of(directory, 10)
    with ThreadPoolExecutor(2) as pool:
        for number in range(4):
            state = state_of(number, 4, columns=True)
            with CommittedSource(
                checkpoint_index.step_directory(directory, 10),
                manifest,
                number,
                4,
                "own",
                alone=False,
                local_rank=number,
            ) as source:
                restore(source, state, pool)
            assert is_right(state)
    assert len(asked) == 4 * 4
    assert max(asked) == 16 << 20
    assert max(in_ring, default=0) <= BLOCK_BYTES


def test_a_flipped_bit_is_found(directory: Path) -> None:
    path = checkpoint_index.step_directory(directory, 10) / "node-1.h5"
    for at in (path.stat().st_size // 3, path.stat().st_size - 30_000):
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
            for world, columns in ((2, False), (1, False), (4, True)):
                with pytest.raises(CorruptCheckpoint):
                    rank(directory, world - 1, world).restore(state_of(world - 1, world, columns), step=10)
            os.pwrite(file.fileno(), bytes([byte]), at)


def test_torchs_loads_read_them(directory: Path) -> None:
    state = {"rows": torch.zeros(ROWS // 2, COLUMNS), "few": torch.zeros(7, dtype=torch.int64)}
    dcp.load(state, storage_reader=ResilioReader(directory, 20), no_dist=True)
    assert (state["rows"].numpy() == WHOLE[: ROWS // 2]).all()
    assert (state["few"] == torch.arange(7)).all()


def commands(directory: Path, target: Path) -> Iterator[list[str]]:
    yield ["ls", str(directory)]
    yield ["show", str(directory), "10"]
    yield ["verify", str(directory)]
    yield ["copy", str(directory), str(target), "10"]
    yield ["verify", str(target)]
    yield ["export", str(directory), str(target / "out.safetensors"), "20"]


def test_commands_take_them_and_a_copy_is_of_this_version(directory: Path, tmp_path: Path) -> None:
    for argv in commands(directory, tmp_path / "copy"):
        assert ckpt.main(argv) == 0, argv
    sealed = (checkpoint_index.step_directory(tmp_path / "copy", 10) / checkpoint_index.MANIFEST).read_text()
    assert f'"version":{VERSION}' in sealed
    state = state_of(0, 1)
    rank(tmp_path / "copy", 0, 1).restore(state, step=10)
    assert is_right(state)


def test_differences_to_them_are_told_as_far_as_they_are_known(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"rows": torch.from_numpy(WHOLE[: ROWS // 2]), "few": torch.arange(7)}
    dcp.save(state, storage_writer=ResilioWriter(directory, 30), no_dist=True)
    assert ckpt.main(["diff", str(directory), "20", "30"]) == 1
    said = capsys.readouterr().out
    assert "checksums of 16 → 1 MiB each, which cannot be compared" in said
    assert "few: content" not in said
