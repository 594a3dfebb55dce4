"""An arena that was mapped before its restore: as verified as one that is read, and as good for the next saves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import huge_memory
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import map_shared, populate
from tests.support.mounts import mounted

POOL = ThreadPoolExecutor(2)
LARGE = 48 * BLOCK_BYTES + 12_345  # bytes: more than a thread takes in one go


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def shm(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In small pages, as before Linux 6.1 and where memory is in pieces."""
    monkeypatch.setattr(huge_memory, "make_huge", lambda mapping: False)
    return memory


@pytest.fixture
def given(memory: Path) -> Path:
    """In huge pages that the kernel gathers."""
    if not save(a_life(memory), 1) or not a_life(memory)._slots[0].has_huge_pages:
        pytest.skip("this kernel gathers no huge pages (Linux 6.1), or has none left")
    return memory


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, "huge=within_size"):
        yield tmp_path


def a_life(directory: Path) -> ArenaPair:
    """A process's arenas, of which none is mapped yet."""
    return ArenaPair(directory, Owner(0, 0, 1, 1, 0, "own", "a run"), directory / "spill")


def state(size: int, step: int) -> dict[str, object]:
    return {
        "large": np.arange(size, dtype=np.uint8) * np.uint8(step),
        "small": [np.full(number, step, dtype=np.int16) for number in range(50)],
        "step": step,
    }


def save(arenas: ArenaPair, step: int, size: int = LARGE) -> Path:
    return Snapshot(arenas, step, flatten(state(size, step)), POOL).finish()[0]


def restored(arenas: ArenaPair, step: int, into: dict[str, object] | None = None) -> dict[str, object]:
    path, memory = arenas.held(step), arenas.memory(step)
    assert path is not None
    with ArenaSource(path, memory=memory) as source:
        return restore(source, into, POOL)  # type: ignore[no-any-return]


def check(found: dict[str, object], size: int, step: int) -> None:
    wanted = state(size, step)
    assert found["step"] == step
    assert np.array_equal(found["large"], wanted["large"])  # type: ignore[arg-type]
    assert all(map(np.array_equal, found["small"], wanted["small"]))  # type: ignore[call-overload]


def test_it_gives_what_was_saved_new_and_in_place(shm: Path) -> None:
    save(a_life(shm), 3)
    arenas = a_life(shm)
    assert len(arenas.memory(3)) == 0
    arenas = a_life(shm)
    arenas.map_held(3)
    assert len(arenas.memory(3)) > LARGE
    check(restored(arenas, 3), LARGE, 3)
    mine = state(LARGE, 9)
    large = mine["large"]
    assert restored(arenas, 3, mine)["large"] is large
    check(mine, LARGE, 3)


def test_what_is_not_mapped_by_then_is_read(shm: Path) -> None:
    first = a_life(shm)
    many = {str(number): np.full(20_000_000, number, dtype=np.uint8) for number in range(4)}
    Snapshot(first, 3, flatten(many), POOL).finish()
    arenas = a_life(shm)
    asked = iter([True, False])
    slot, header = arenas._holder(3) or pytest.fail("step 3 is not held")
    slot.map_snapshot(header.size_bytes, lambda: next(asked))
    with arenas.memory(3) as memory:
        assert 20_000_000 < len(memory) < 40_000_000
    found = restored(arenas, 3)
    assert all((found[str(number)] == number).all() for number in range(4))  # type: ignore[union-attr]
    arenas.map_held(3)
    with arenas.memory(3) as memory:
        assert len(memory) == 33_554_432  # who has asked does not want it any more


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, LARGE - 1])
def test_a_bit_that_flipped_is_found(at: int, shm: Path) -> None:
    path = save(a_life(shm), 3)
    arenas = a_life(shm)
    arenas.map_held(3)
    with ArenaSource(path) as source:
        record = next(record for record in source.tensors if record.size_bytes == LARGE)
    with path.open("r+b") as file:
        file.seek(record.offset + at)
        byte = file.read(1)
        file.seek(record.offset + at)
        file.write(bytes([byte[0] ^ 16]))
    with pytest.raises(CorruptCheckpoint, match="large does not match its checksum at byte"):
        restored(arenas, 3)


@pytest.mark.parametrize("size", [LARGE // 20, LARGE, 2 * LARGE])
def test_the_next_saves_use_it_whatever_their_size(size: int, shm: Path) -> None:
    save(a_life(shm), 3)
    arenas = a_life(shm)
    arenas.map_held(3)
    for step in (4, 5, 6):
        path = save(arenas, step, size)
        found = path.stat()
        assert found.st_blocks * 512 >= found.st_size  # no page is missing
        check(restored(arenas, step), size, step)


def test_a_hole_that_a_former_life_left_is_filled_before_it_is_written_to(shm: Path) -> None:
    path = save(a_life(shm), 3, 100_000)
    os.truncate(path, path.stat().st_size + 4_000_000)  # it was about to grow
    arenas = a_life(shm)
    arenas.map_held(3)
    check(restored(arenas, 3), 100_000, 3)
    save(arenas, 4, 2_000_000)
    assert save(arenas, 5, 2_000_000) == path
    assert path.stat().st_blocks * 512 >= 2_000_000
    check(restored(arenas, 5), 2_000_000, 5)


def test_what_is_not_held_or_lies_on_disk_is_not_mapped(shm: Path) -> None:
    on_disk = ArenaPair(shm, Owner(0, 0, 1, 1, 0, "own", "a run"), shm / "spill", on_disk=True)
    save(on_disk, 3, 1000)
    arenas = a_life(shm)
    arenas.map_held(3)
    arenas.map_held(4)
    assert len(arenas.memory(3)) == len(arenas.memory(4)) == 0


@pytest.mark.parametrize("kind", ["given", "huge"])
def test_in_huge_pages_it_need_not_be_mapped_ahead(kind: str, request: pytest.FixtureRequest) -> None:
    huge: Path = request.getfixturevalue(kind)
    path = save(a_life(huge), 3)
    assert huge_kb(path) * 1024 > LARGE // 2
    arenas = a_life(huge)
    with arenas.memory(3) as memory:
        assert len(memory) > LARGE
    check(restored(arenas, 3), LARGE, 3)
    save(arenas, 4)
    check(restored(a_life(huge), 4), LARGE, 4)
    with path.open("r+b") as file:
        file.seek(LARGE // 2)
        byte = file.read(1)
        file.seek(LARGE // 2)
        file.write(bytes([byte[0] ^ 16]))
    with pytest.raises(CorruptCheckpoint, match="large does not match its checksum at byte"):
        restored(a_life(huge), 3)


def test_what_grew_in_small_pages_is_not_taken_for_huge(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel had no more of them."""
    monkeypatch.setattr(huge_memory, "make_huge", lambda mapping: True)
    save(a_life(memory), 2, 100 << 20)
    save(a_life(memory), 3, 100 << 20)
    assert all(slot.has_huge_pages for slot in a_life(memory)._slots)
    left = iter([True, False])
    monkeypatch.setattr(huge_memory, "make_huge", lambda mapping: next(left))
    arenas = a_life(memory)
    path = save(arenas, 4, 300 << 20)  # of four pieces more the first gets them, and nobody asks for the last two
    assert next(left, None) is None
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    arenas = a_life(memory)
    assert sorted(slot.has_huge_pages for slot in arenas._slots) == [False, True]
    assert len(arenas.memory(4)) == 0
    check(restored(arenas, 4), 300 << 20, 4)


def test_a_full_file_system_is_told_and_keeps_the_other_snapshot(tmp_path: Path) -> None:
    """Huge pages take no more of it than there is, and nobody writes to a page that is not there."""
    with mounted(tmp_path, f"size={200 << 20}"):
        arenas = a_life(tmp_path)
        save(arenas, 1)
        with pytest.raises(OSError, match="No space left"):
            arenas._slots[1].make_room(180 << 20)
        assert arenas._slots[1].size_bytes == 0
        check(restored(arenas, 1), LARGE, 1)
        arenas._slots[1].make_room(100 << 20)[:] = bytes(100 << 20)


def huge_kb(path: Path) -> int:
    """How much of a file in memory can be mapped in huge pages."""
    size = path.stat().st_size
    with path.open("r+b") as file, map_shared(file.fileno(), size, True) as memory:
        populate(memory)
        maps = Path("/proc/self/smaps").read_text().split(str(path))[1]
        return int(maps.split("ShmemPmdMapped:")[1].split()[0])
