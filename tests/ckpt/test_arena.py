"""Arenas hold the old snapshot or the new one, whole; what is pinned stays; what is bad is not believed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_slot import Slot
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint
from resilio_hpc.core.process import run
from tests.support.environments import SUPPORT
from tests.support.mounts import mounted
from tests.support.requirements import need_extensions

POOL = ThreadPoolExecutor(2)


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


def pair(directory: Path, rank: int = 0, world: int = 1, round_: int = 0) -> ArenaPair:
    return ArenaPair(directory, Owner(rank, rank, world, world, round_, "own", "a run"), directory / "spill")


def save(arenas: ArenaPair, step: int, size: int = 1000) -> Path:
    return Snapshot(arenas, step, flatten({"x": np.full(size, step), "step": step}), POOL).finish()[0]


def value(path: Path) -> int:
    with ArenaSource(path) as source:
        state = restore(source, None, POOL)
    assert (state["x"] == state["step"]).all()
    return int(state["step"])


def held_steps(directory: Path) -> list[int]:
    return [held.step for held in arena.scan(directory)]


def test_a_rank_killed_at_any_instant_leaves_a_whole_and_right_step(shm: Path) -> None:
    script = SUPPORT / "ckpt" / "kill_loop.py"
    done = run([sys.executable, str(script), str(shm), "100"], 120, check=False)
    assert done.returncode == 0, done.stderr
    rounds, steps = map(int, done.stdout.split())
    assert steps > rounds / 4  # it did save in between


def test_the_second_slot_is_made_ready_once_and_as_large_as_it_must_be(shm: Path) -> None:
    arenas = pair(shm)
    first = save(arenas, 1, size=100_000)
    arenas.prefault()
    second = arena.slot_path(shm, 0, 1)
    before = second.stat()
    assert before.st_blocks == first.stat().st_blocks  # every page is there
    assert held_steps(shm) == [1]
    assert save(arenas, 2, size=100_000) == second
    after = second.stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    arenas.prefault()  # nothing is left to do
    assert held_steps(shm) == [1, 2]


def test_the_two_newest_steps_are_kept(shm: Path) -> None:
    arenas = pair(shm)
    for step in (1, 2, 3):
        save(arenas, step)
    assert held_steps(shm) == [2, 3]
    assert [value(held.path) for held in arena.scan(shm)] == [2, 3]
    assert {path.stat().st_mode & 0o777 for path in shm.iterdir()} == {0o600}


def pinned(directory: Path, step: int) -> arena.Pin:
    """All ranks have it."""
    pin = arena.pin(directory, step)
    assert pin is not None
    return pin


def test_a_pinned_step_is_not_overwritten_until_it_is_unpinned(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 1)
    pin = pinned(shm, 1)
    assert pin.paths == [shm / "rank0.slot0"]
    for step in (2, 3, 4):
        save(arenas, step)
    assert held_steps(shm) == [1, 4]
    pin.release()
    save(arenas, 5)
    assert held_steps(shm) == [4, 5]


def test_what_is_pinned_twice_is_free_when_both_have_let_go(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 1)
    first, second = pinned(shm, 1), pinned(shm, 1)
    first.release()
    first.release()
    save(arenas, 2)
    save(arenas, 3)
    assert held_steps(shm) == [1, 3]
    second.release()
    save(arenas, 4)
    assert held_steps(shm) == [3, 4]


def test_when_both_slots_are_pinned_the_save_fails_and_both_stay(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 1)
    save(arenas, 2)
    pins = [pinned(shm, 1), pinned(shm, 2)]
    with pytest.raises(CheckpointError, match="still being written"):
        save(arenas, 3)
    assert held_steps(shm) == [1, 2]
    for pin in pins:
        pin.release()


def test_a_step_is_pinned_only_if_every_rank_of_the_node_has_it(shm: Path) -> None:
    first, second = pair(shm, 0, 2), pair(shm, 1, 2)
    save(first, 7)
    assert arena.pin(shm, 7) is None
    save(second, 7)
    pin = pinned(shm, 7)
    assert pin.paths == [shm / "rank0.slot0", shm / "rank1.slot0"]
    pin.release()


def test_snapshots_of_different_rounds_are_not_mixed(shm: Path) -> None:
    save(pair(shm, 0, 2, round_=0), 7)
    save(pair(shm, 1, 2, round_=1), 7)
    assert arena.pin(shm, 7) is None


def test_pins_end_with_the_process_that_holds_them(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 1)
    pinning = f"arena.pin(Path({str(shm)!r}), 1).paths"
    code = f"from pathlib import Path; from resilio_hpc.ckpt.snapshot import arena; print({pinning})"
    assert "rank0.slot0" in run([sys.executable, "-c", code], 30).stdout
    save(arenas, 2)
    save(arenas, 3)
    assert held_steps(shm) == [2, 3]


def test_an_invalidated_step_is_gone(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 1)
    save(arenas, 2)
    arena.invalidate(shm, 2)
    assert held_steps(shm) == [1]
    save(arenas, 3)
    assert held_steps(shm) == [1, 3]


def test_after_a_roll_back_the_later_steps_of_the_former_life_are_forgotten(shm: Path) -> None:
    arenas = pair(shm)
    save(arenas, 10)
    save(arenas, 20)
    arenas.drop_after(10)
    assert held_steps(shm) == [10]
    save(arenas, 20)
    later = pair(shm, round_=1)
    save(later, 15)  # 20 belongs to a life that is over: it goes first, and 10 stays
    assert held_steps(shm) == [10, 15]


def test_saving_a_step_again_keeps_one_of_it(shm: Path) -> None:
    arenas = pair(shm)
    for step in (1, 2, 2):
        save(arenas, step)
    assert held_steps(shm) == [2]


def test_who_brings_a_snapshot_takes_nothing_of_what_is_saved_once_it_is_whole(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank restores while the process that brought it is held up."""
    finish = Slot.finish

    def held_up(slot: Slot, header: Header) -> None:
        finish(slot, header)
        if header.step == 5:
            save(pair(shm), 6)

    monkeypatch.setattr(Slot, "finish", held_up)
    save(pair(shm), 5)
    assert held_steps(shm) == [5, 6]


def test_a_new_life_adopts_the_arenas_of_the_former(shm: Path) -> None:
    save(pair(shm), 1)
    arenas = pair(shm, round_=1)
    assert arenas.held(1) == shm / "rank0.slot0"
    save(arenas, 2)
    assert held_steps(shm) == [1, 2]


@pytest.mark.parametrize("where", ["data", "table", "tree", "header", "truncated"])
def test_a_damaged_arena_is_detected(where: str, shm: Path) -> None:
    path = save(pair(shm), 5, size=100_000)
    with ArenaSource(path) as source:
        header, table = source.header, source.table
    if where == "truncated":
        os.truncate(path, header.size_bytes - 1)
    else:
        at = {
            "data": table.tensors[0].offset + 700_000,
            "table": header.table_offset + 30,
            "tree": table.tree.offset + 2,
            "header": 24,
        }[where]
        flip(path, at)
    with pytest.raises(CorruptCheckpoint):
        value(path)
    assert held_steps(shm) == ([] if where in ("header", "truncated") else [5])


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


@given(st.binary(min_size=0, max_size=200), st.integers(0, 300))
def test_garbage_in_a_header_is_never_a_snapshot(garbage: bytes, at: int) -> None:
    header = arena.Header(5, 1, 0, 0, 1, 1, 0, "own", "run", 4096, 10, 0, 8192)
    page = bytearray(arena.pack(header).ljust(PAGE, b"\0"))
    page[arena.STATE_AT : arena.STATE_AT + 8] = arena.WHOLE
    assert arena.unpack(bytes(page)) == header
    before = bytes(page)
    page[at : at + len(garbage)] = garbage
    found = arena.unpack(bytes(page[:PAGE]))
    assert found is None or found == header or bytes(page) == before


def test_strangers_in_the_directory_are_left_alone(shm: Path) -> None:
    (shm / "rank0.slot7").write_bytes(b"x")
    (shm / "rank1.slot0").mkdir()
    (shm / "rank2.slot0").write_bytes(b"short")
    assert arena.scan(shm) == []
    assert arena.scan(shm / "missing") == []
    (shm / "rank1.slot0").rmdir()
    arena.remove(shm)
    assert [path.name for path in shm.iterdir()] == ["rank0.slot7"]


def test_removing_takes_the_directory_and_files_on_disk_too(tmp_path: Path) -> None:
    directory, spill = tmp_path / "arenas", tmp_path / "disk"
    directory.mkdir()
    arenas = ArenaPair(directory, Owner(0, 0, 1, 1, 0, "own", "run"), spill, on_disk=True)
    path = save(arenas, 1)
    assert path.is_symlink()
    assert value(path) == 1
    arenas.close()
    arena.remove(directory)
    assert not directory.exists()
    assert not spill.exists()


def test_agents_import_neither_torch_nor_h5py_nor_numpy() -> None:
    need_extensions()  # without them numpy computes the checksums
    code = (
        "import sys, resilio_hpc.ckpt.snapshot.arena, resilio_hpc.ckpt.store.checkpoint_index\n"
        "import resilio_hpc.ckpt.saver.messages\n"
        "print([name for name in ('torch', 'h5py', 'numpy') if name in sys.modules])"
    )
    assert run([sys.executable, "-c", code], 30).stdout.strip() == "[]"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "size=8m") as directory:
        yield directory


def test_full_shared_memory_moves_the_new_snapshot_to_disk_and_keeps_the_old(small_disk: Path, tmp_path: Path) -> None:
    arenas = ArenaPair(small_disk, Owner(0, 0, 1, 1, 0, "own", "run"), tmp_path / "disk")
    save(arenas, 1, size=100_000)
    save(arenas, 2, size=100_000)
    save(arenas, 3, size=2_000_000)
    assert arenas.on_disk
    assert held_steps(small_disk) == [2, 3]
    assert [value(held.path) for held in arena.scan(small_disk)] == [2, 3]
    pinned(small_disk, 3).release()
    again = ArenaPair(small_disk, Owner(0, 0, 1, 1, 1, "own", "run"), tmp_path / "disk")  # the next life finds both
    assert again.held(3) is not None
    save(again, 4, size=2_000_000)
    assert held_steps(small_disk) == [3, 4]


def test_no_room_anywhere_is_an_error_and_the_old_snapshot_stays(small_disk: Path) -> None:
    arenas = ArenaPair(small_disk, Owner(0, 0, 1, 1, 0, "own", "run"), small_disk / "disk")
    save(arenas, 1)
    with pytest.raises(OSError, match="No space"):
        save(arenas, 2, size=4_000_000)
    assert held_steps(small_disk) == [1]
    save(arenas, 3)
    assert held_steps(small_disk) == [1, 3]
