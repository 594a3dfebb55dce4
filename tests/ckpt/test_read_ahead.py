"""What ranks will restore is in the page cache before they ask; what is not sure to help is left alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt.checkpointer import Checkpointer
from resilio_hpc.ckpt.coordination.coordinator import is_read_ahead
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.read_ahead import NEWEST, Done, ReadAhead, read_ahead
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.memory_left import MemoryLeft
from tests.support.ckpt.local_node import POOL, Node, flip, node_in
from tests.support.waiting import until

SIZE = 500_000  # numbers of eight bytes, per rank
ROOT = Path(__file__).resolve().parents[2]
PLENTY = MemoryLeft(1 << 40, 1 << 40)


@pytest.fixture
def node(disk_path: Path) -> Iterator[Node]:
    with node_in(disk_path) as found:
        for step in (3, 5):
            found.commit(found.persist(step, size=SIZE))
        yield found


def shard(node: Node, step: int) -> Path:
    return node.shared / f"step-{step:010d}" / "node-0.h5"


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert cached(path) < 100_000, "this file system keeps what it is told to forget"


def cached(path: Path) -> int:
    """Bytes of a file that can be had without a disk (mincore)."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        here = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(here), ctypes.c_size_t(size), pages) == 0
        del here
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def request(node: Node, step: int = NEWEST, ranks: tuple[int, ...] = (0, 1), world_size: int = 2) -> ReadAhead:
    return ReadAhead(str(node.shared), step, world_size, ranks, str(node.arenas / "begun"))


def test_what_ranks_read_from_other_nodes_disks_is_not_read_ahead(node: Node, tmp_path: Path) -> None:
    (manifest,) = [found for found in checkpoint_index.committed(node.shared) if found.step == 5]
    assert manifest.shards[0].node == "n1"
    others = msgspec.structs.replace(request(node), others=("n1",))
    evict(shard(node, 5))
    assert read_ahead(others, PLENTY).size_bytes == 0
    assert cached(shard(node, 5)) < 100_000
    assert read_ahead(msgspec.structs.replace(others, local=str(node.disk)), PLENTY).size_bytes == 2 * (SIZE * 8 + 3)
    assert read_ahead(msgspec.structs.replace(others, others=("n2",)), PLENTY).size_bytes == 2 * (SIZE * 8 + 3)


def wait_until_cached(path: Path, size: int) -> None:
    """Wait for most of it: to read ahead is a hint, and the kernel leaves parts out where memory is short."""
    until(lambda: cached(path) >= size // 2, f"half of {size} bytes is in the page cache", lambda: cached(path))


def test_the_newest_step_is_in_the_page_cache_before_anybody_asks(node: Node) -> None:
    evict(shard(node, 3))
    evict(shard(node, 5))
    argv = [sys.executable, "-m", "resilio_hpc.ckpt.restore.read_ahead", msgspec.json.encode(request(node)).decode()]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    said = msgspec.json.decode(done.stdout, type=Done)
    assert (said.step, said.size_bytes, said.why_not) == (5, 2 * (SIZE * 8 + 3), "")
    assert is_read_ahead(node.arenas / "begun", 5)
    wait_until_cached(shard(node, 5), said.size_bytes)
    assert cached(shard(node, 3)) < 100_000


def test_only_the_parts_of_this_nodes_ranks_are_read(node: Node) -> None:
    evict(shard(node, 3))
    assert read_ahead(request(node, 3, ranks=(1,)), PLENTY).size_bytes == SIZE * 8 + 3
    wait_until_cached(shard(node, 3), SIZE * 8)
    assert cached(shard(node, 3)) < 1.5 * SIZE * 8


def test_a_step_that_was_found_damaged_is_not_guessed(node: Node) -> None:
    checkpoint_index.note_damage(node.shared, 5, "a bit was flipped")
    assert read_ahead(request(node), PLENTY).step == 3


@pytest.mark.parametrize("factor", [1, 3])
def test_without_much_memory_nothing_is_read(node: Node, factor: int) -> None:
    evict(shard(node, 5))
    done = read_ahead(request(node), MemoryLeft(factor * 2 * SIZE * 8, 1 << 40))
    assert done.size_bytes == 0
    assert done.why_not.endswith("MiB of memory are left for 7 MiB")
    assert not is_read_ahead(node.arenas / "begun", 5)
    assert cached(shard(node, 5)) < 100_000


def test_what_another_number_of_ranks_wants_is_not_known(node: Node) -> None:
    done = read_ahead(request(node, world_size=3, ranks=(2,)), PLENTY)
    assert done.size_bytes == 0
    assert "another number of ranks" in done.why_not
    assert not is_read_ahead(node.arenas / "begun", 5)


def test_without_a_step_there_is_nothing_to_tell(node: Node, tmp_path: Path) -> None:
    none = msgspec.structs.replace(request(node), directory=str(tmp_path / "none"))
    assert read_ahead(none, PLENTY) == Done(NEWEST, 0, 0.0)


def test_a_damaged_step_is_an_answer(node: Node) -> None:
    (shard(node, 5).parent / "manifest.json").write_text("{")
    argv = [sys.executable, "-m", "resilio_hpc.ckpt.restore.read_ahead", msgspec.json.encode(request(node, 5)).decode()]
    done = subprocess.run(argv, capture_output=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    said = msgspec.json.decode(done.stdout, type=Done)
    assert said.size_bytes == 0
    assert "manifest" in said.why_not
    assert done.stderr == b""


def test_what_is_read_from_the_page_cache_is_verified_too(node: Node) -> None:
    manifest = checkpoint_index.manifest_of(node.shared, 5)
    target = np.zeros(SIZE)
    for damage in (False, True):
        with CommittedSource(shard(node, 5).parent, manifest, 1, 2, "own", cached=True) as source:
            record = next(record for record in source.tensors if record.size_bytes == SIZE * 8)
            if damage:
                flip(shard(node, 5), source.whole(record).record.offset + 12345)
                with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
                    source.fill([(record, memoryview(target).cast("B"))], POOL)
            else:
                source.fill([(record, memoryview(target).cast("B"))], POOL)
                assert (target.view(np.int64) == 501).all()


@pytest.mark.parametrize(("begun", "direct"), [("5", False), ("3", True), (None, True)])
def test_ranks_read_by_way_of_the_cache_what_is_being_read_ahead(
    node: Node, monkeypatch: pytest.MonkeyPatch, begun: str | None, direct: bool
) -> None:
    if begun is not None:
        (node.arenas / "begun").write_text(begun)
    seen: set[bool] = set()
    read = bulk_io.read

    def watched(fd: int, segments: list[bulk_io.Segment], direct: bool = True) -> list[int]:
        seen.add(direct)
        return read(fd, segments, direct)

    monkeypatch.setattr(bulk_io, "read", watched)
    monkeypatch.setattr(LocalCoordinator, "read_ahead", node.arenas / "begun")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = {"x": np.zeros(SIZE, dtype=np.int64), "y": np.zeros(3, dtype=np.int8), "rank": 0}
    assert Checkpointer(node.shared).restore(state, 5) is not None
    assert (state["x"] == 501).all()
    assert seen == {direct}
