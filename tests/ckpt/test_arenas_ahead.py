"""What a process without a rank maps ahead: what all ranks of the node hold; not what is being made, or was removed."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.restore.arena_source import ArenaSource, Mappings
from resilio_hpc.ckpt.restore.arenas_ahead import ArenasAhead
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CorruptCheckpoint
from tests.support.waiting import until

POOL = ThreadPoolExecutor(2)
COUNT = 2_000_000


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def has_rank() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def saved(directory: Path, rank: int, step: int) -> Path:
    pair = ArenaPair(directory, Owner(rank, rank, 2, 2, 0, "own", "a run"), directory / "spill")
    return Snapshot(pair, step, flatten({"x": np.full(COUNT, step), "step": step}), POOL).finish()[0]


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def read(path: Path, mappings: Mappings | None) -> int:
    with ArenaSource(path, mappings) as source:
        state = restore(source, None, POOL)
    assert (state["x"] == state["step"]).all()
    return int(state["step"])


def known(mappings: Mappings, path: Path) -> int:
    with path.open("rb") as file:
        return len(mappings.known(file.fileno()))


def test_what_all_ranks_hold_is_mapped_whole_and_read_from_there(shm: Path, has_rank: threading.Event) -> None:
    paths = [saved(shm, rank, 5 + rank) for rank in range(2)]
    ahead = ArenasAhead(shm, has_rank.is_set, 0.01)
    until(lambda: all(map(is_mapped, paths)), "the arenas that are mapped")
    later = saved(shm, 2, 7)
    until(lambda: is_mapped(later), "the arenas that are mapped")
    mappings = ahead.take()
    assert [known(mappings, path) for path in (*paths, later)] == [path.stat().st_size for path in (*paths, later)]
    assert [read(path, mappings) for path in (*paths, later)] == [5, 6, 7]


def test_a_later_step_in_the_same_memory_is_the_one_that_is_read(shm: Path, has_rank: threading.Event) -> None:
    pair = ArenaPair(shm, Owner(0, 0, 1, 1, 0, "own", "a run"), shm / "spill")
    for step in (1, 2):
        Snapshot(pair, step, flatten({"x": np.full(COUNT, step), "step": step}), POOL).finish()
    ahead = ArenasAhead(shm, has_rank.is_set, 0.01)
    until(lambda: all(is_mapped(held.path) for held in arena.scan(shm)), "the arenas that are mapped")
    path = Snapshot(pair, 3, flatten({"x": np.full(COUNT, 3), "step": 3}), POOL).finish()[0]
    assert read(path, ahead.take()) == 3


def test_a_flipped_bit_in_mapped_memory_is_found(shm: Path, has_rank: threading.Event) -> None:
    path = saved(shm, 0, 5)
    ahead = ArenasAhead(shm, has_rank.is_set, 0.01)
    until(lambda: is_mapped(path), "the arenas that are mapped")
    mappings = ahead.take()
    with ArenaSource(path) as source:
        place = source.tensors[0].offset + source.tensors[0].size_bytes // 2
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    for given in (mappings, None):
        with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
            read(path, given)


def test_removed_memory_is_let_go(shm: Path, has_rank: threading.Event) -> None:
    path = saved(shm, 0, 5)
    ahead = ArenasAhead(shm, has_rank.is_set, 0.01)
    until(lambda: is_mapped(path), "the arenas that are mapped")
    path.unlink()
    until(lambda: not is_mapped(path), "the arenas that are mapped")
    ahead.take()
    assert not is_mapped(path)


def test_memory_that_is_being_made_is_not_taken(shm: Path, has_rank: threading.Event) -> None:
    sparse = arena.slot_path(shm, 0, 1)
    with sparse.open("wb") as file:
        os.ftruncate(file.fileno(), 64 << 20)
    short = arena.slot_path(shm, 0, 0)
    short.write_bytes(b"x")
    whole = saved(shm, 1, 5)
    ahead = ArenasAhead(shm, has_rank.is_set, 0.01)
    until(lambda: is_mapped(whole), "the arenas that are mapped")
    mappings = ahead.take()
    assert (known(mappings, sparse), known(mappings, short)) == (0, 0)
    assert sparse.stat().st_blocks == 0


def test_it_ends_with_the_wait_for_a_rank(shm: Path, has_rank: threading.Event) -> None:
    has_rank.set()
    path = saved(shm, 0, 5)
    mappings = ArenasAhead(shm, has_rank.is_set, 0.01).take()
    assert not is_mapped(path)
    assert read(path, mappings) == 5
