"""The ring that processes of a node read common blocks through: each once, and as written."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment
from resilio_hpc.ckpt.restore import block_ring, block_table
from resilio_hpc.ckpt.restore.block_table import LIMITS, RingLimits
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c
from tests.support.ckpt.opened import opened
from tests.support.ckpt.ring_readers import BLOCK, CONTENT, count_reads, is_right, reader, together, wanted
from tests.support.mounts import mounted
from tests.support.requirements import need_extensions, need_root
from tests.support.waiting import PATIENCE_S, until


def test_who_reads_the_same_reads_it_once(rings: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_reads(monkeypatch)
    blocks = [SharedBlocks("x", rings) for _ in range(4)]
    found = [wanted() for _ in blocks]
    results: list[list[int]] = []

    def act(one: SharedBlocks, segments: list[Segment]) -> None:
        for share in range(0, 24, 8):
            results.append(one.read(opened(file).file, segments[share : share + 8]))

    together(
        *(lambda one=one, segments=segments: act(one, segments) for one, segments in zip(blocks, found, strict=True))
    )
    assert all(map(is_right, found))
    assert results == [[]] * 12
    assert sum(sizes) == 24 * BLOCK
    assert len(sizes) <= 12  # neighbours in one go
    for one in blocks:
        one.close()


def test_who_is_slower_is_waited_for_so_that_all_is_read_once(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RingLimits(slots=6, seen_s=PATIENCE_S, patience_s=PATIENCE_S, lock_patience_s=PATIENCE_S)
    sizes = count_reads(monkeypatch)
    copied = block_ring.Ring._copied
    blocks = [SharedBlocks("x", rings, limits) for _ in range(3)]
    found = [wanted() for _ in blocks]
    for one in blocks:
        assert one.read(opened(file).file, wanted([0])) == []
    delays = {one._ring: 0.03 * number for number, one in enumerate(blocks)}
    all_want = threading.Barrier(len(blocks), timeout=PATIENCE_S)
    have_begun = set[block_ring.Ring]()

    def slowly(ring: block_ring.Ring, *what: Any) -> set[int]:
        if ring not in have_begun:
            have_begun.add(ring)
            all_want.wait()
        time.sleep(delays[ring])
        return copied(ring, *what)

    monkeypatch.setattr(block_ring.Ring, "_copied", slowly)
    together(
        *(
            lambda one=one, all_of_it=all_of_it: one.read(opened(file).file, all_of_it)
            for one, all_of_it in zip(blocks, found, strict=True)
        )
    )
    assert all(map(is_right, found))
    assert sum(sizes) == 24 * BLOCK
    for one in blocks:
        one.close()


def test_instead_of_waiting_for_others_a_thread_reads_ahead(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count_reads(monkeypatch)
    counted, goes_on = os.preadv, threading.Event()

    def slow(fd: int, rooms: Any, offset: int) -> int:
        if offset == 0:
            assert goes_on.wait(PATIENCE_S)
        elif offset == 8 * BLOCK:  # all that it was to read ahead is there, and more is not
            goes_on.set()
        return counted(fd, rooms, offset)

    monkeypatch.setattr(os, "preadv", slow)
    patient = RingLimits(patience_s=PATIENCE_S, lock_patience_s=PATIENCE_S)
    with closing(SharedBlocks("x", rings, patient)) as one, closing(SharedBlocks("x", rings, patient)) as other:
        first, same, following = wanted(range(4)), wanted(range(4)), wanted(range(4, 12))
        assert one.read(opened(file).file, wanted([23])) == []
        thread = threading.Thread(target=lambda: one.read(opened(file).file, first))
        thread.start()
        ring = one._ring
        assert ring is not None
        until(lambda: any(ring.table.entry(slot).claimed for slot in range(LIMITS.slots)), "it reads")
        assert other.read(opened(file).file, same, soon=following) == []
        thread.join(PATIENCE_S)
        assert sum(sizes) == 13 * BLOCK
        assert not is_right(following)  # they are in the ring, and nowhere else yet
        assert one.read(opened(file).file, following) == []
        assert sum(sizes) == 13 * BLOCK
        assert is_right([*first, *same, *following])


def test_what_cannot_be_read_ahead_is_told_when_it_is_wanted(rings: Path, file: int) -> None:
    os.pwrite(file, bytes([CONTENT[5 * BLOCK] ^ 1]), 5 * BLOCK)
    os.truncate(file, 23 * BLOCK)
    hasty = RingLimits(patience_s=0.2)
    with closing(SharedBlocks("x", rings, hasty)) as one, closing(SharedBlocks("x", rings, hasty)) as other:
        assert one.read(opened(file).file, wanted([0])) == []
        found, soon = wanted([0]), wanted([5, 6, 23])
        ring = one._ring
        assert ring is not None
        claim = block_table.Claim(9, 9)
        status = os.fstat(file)
        with ring.table._locked():  # somebody reads it for now
            ring.table.claim(claim, time.monotonic_ns(), (status.st_dev, status.st_ino, BLOCK, wanted([1])[0].crc32c))
        results: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: results.append(other.read(opened(file).file, [*found, *wanted([1])], soon=soon))
        )
        thread.start()
        thread.join(PATIENCE_S)
        assert results == [[]]
        assert one.read(opened(file).file, wanted([5, 6])) == [0]
        with pytest.raises(OSError) as caught:
            one.read(opened(file).file, wanted([23]))
        assert caught.value.errno == errno.ENODATA


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_whoever_wants_what_in_a_small_ring_gets_it(data: st.DataObject) -> None:
    directory = Path(f"/dev/shm/test-rings-small-{os.getpid()}")
    file = os.memfd_create("shard")
    os.write(file, CONTENT)
    with ExitStack() as stack:
        directory.mkdir(mode=0o700)
        stack.callback(directory.rmdir)
        stack.callback(os.close, file)
        limits = RingLimits(slots=data.draw(st.integers(1, 6)))
        sets = data.draw(st.lists(st.sets(st.integers(0, 22), min_size=1), min_size=1, max_size=4))
        shift = data.draw(st.sampled_from([0, 100, 4096, 70_000]))
        blocks = [stack.enter_context(closing(SharedBlocks("x", directory, limits))) for _ in sets]
        found = [wanted(sorted(numbers), shift) for numbers in sets]
        results: list[list[int]] = []
        together(
            *(
                lambda one=one, segments=segments: results.append(one.read(opened(file).file, segments))
                for one, segments in zip(blocks, found, strict=True)
            )
        )
        assert results == [[]] * len(sets)
        assert all(map(is_right, found))


def test_boxes_and_small_blocks_go_to_their_places(rings: Path, file: int) -> None:
    rows = np.frombuffer(CONTENT[:BLOCK], dtype=np.uint8).reshape(1024, 1024)
    target: Any = np.zeros((1024, 16), dtype=np.uint8)
    box = BoxSegment(
        0, memoryview(target).cast("B"), crc32c(CONTENT[:BLOCK]), BLOCK, 0, (8, 0, 16, ((1024, 1024, 16),))
    )
    small = Segment(BLOCK + 5, memoryview(bytearray(100)), crc32c(CONTENT[BLOCK + 5 :][:100]))
    with closing(SharedBlocks("x", rings)) as one:
        assert one.read(opened(file).file, [box, small, *wanted([2])]) == []
        assert one.read(opened(file).file, []) == []
    assert np.array_equal(target, rows[:, 8:24])
    assert bytes(small.target) == CONTENT[BLOCK + 5 :][:100]


def test_flipped_bits_and_short_files_are_told(rings: Path, file: int) -> None:
    os.pwrite(file, bytes([CONTENT[3 * BLOCK] ^ 1]), 3 * BLOCK)
    os.pwrite(file, bytes([CONTENT[9 * BLOCK - 1] ^ 128]), 9 * BLOCK - 1)
    with closing(SharedBlocks("x", rings)) as one:
        small = Segment(3 * BLOCK, memoryview(bytearray(10)), crc32c(CONTENT[3 * BLOCK :][:10]))
        found = wanted(range(20))
        assert one.read(opened(file).file, found) == [3, 8]
        assert is_right([one for at, one in enumerate(found) if at not in (3, 8)])
        assert one.read(opened(file).file, [small]) == [0]
        os.truncate(file, 23 * BLOCK + 100)
        with pytest.raises(OSError) as caught:
            one.read(opened(file).file, wanted([21, 22, 23]))
        assert caught.value.errno == errno.ENODATA


def test_tensors_that_share_bytes_are_refused(rings: Path, file: int) -> None:
    with closing(SharedBlocks("x", rings)) as one, pytest.raises(CorruptCheckpoint, match="share bytes"):
        one.read(opened(file).file, [*wanted([2]), *wanted([2])])


def test_a_device_that_fails_is_an_error(rings: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need_extensions()  # without them both ways go through os.preadv

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    found = wanted()
    with closing(SharedBlocks("x", rings)) as one:
        assert one.read(opened(file).file, found) == []  # the other way works
        assert is_right(found)
        monkeypatch.setattr(bulk_io, "read", broken)
        with pytest.raises(OSError, match="input/output error"):
            one.read(opened(file).file, wanted([5, 6]))
        monkeypatch.undo()
        assert one.read(opened(file).file, wanted()) == []


def test_where_no_ring_can_be_had_the_page_cache_serves(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    path = rings / f"resilio-blocks-{os.geteuid()}-x"

    def read_it() -> None:
        found = wanted()
        with closing(SharedBlocks("x", rings)) as one:
            assert one.read(opened(file).file, found) == []
            assert one._ring is None
        assert is_right(found)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    read_it()
    assert not path.exists()
    monkeypatch.undo()
    path.symlink_to("/dev/null")
    read_it()
    path.unlink()
    with path.open("w") as used:  # and not swept
        fcntl.flock(used, fcntl.LOCK_SH)
        path.chmod(0o666)  # others could write there
        read_it()
        path.unlink()
    path.mkdir()
    read_it()
    path.rmdir()


def test_a_ring_whose_maker_was_killed_is_made_whole(rings: Path, file: int) -> None:
    """Nobody writes to a page that is not there: with shared memory full, that would be a SIGBUS."""
    path = rings / f"resilio-blocks-{os.geteuid()}-x"
    with path.open("wb") as half:
        path.chmod(0o600)
        os.ftruncate(half.fileno(), block_ring.size_bytes(LIMITS))
        fcntl.flock(half, fcntl.LOCK_SH)  # not swept, but found as it is
        with closing(SharedBlocks("x", rings)) as one:
            found = wanted()
            assert one.read(opened(file).file, found) == []
            assert one._ring is not None
            used = [slot for slot in range(LIMITS.slots) if one._ring.table.entry(slot).token]
            assert len(used) == 24
            for start in (0, *map(one._ring._start, used)):
                assert os.lseek(half.fileno(), start, os.SEEK_HOLE) >= start + BLOCK
        assert is_right(found)
    path.unlink()


def test_a_shared_memory_that_is_full_has_room_for_as_many_blocks_as_it_has(
    rings: Path, file: int, disk_path: Path
) -> None:
    with mounted(rings, "size=6m"), closing(SharedBlocks("x", rings)) as one:
        for _ in range(3):
            found = wanted()
            assert one.read(opened(file).file, found) == []
            assert is_right(found)
        assert one._ring is not None
        used = [slot for slot in range(LIMITS.slots) if one._ring.table.entry(slot).token]
        assert 1 <= len(used) <= 5
        assert not any(one._ring.table.entry(slot).claimed for slot in range(LIMITS.slots))
        processes = [reader(rings, disk_path) for _ in range(2)]
        assert [process.communicate(timeout=PATIENCE_S)[0] for process in processes] == ["done\n"] * 2


def test_what_somebody_else_put_there_is_neither_used_nor_removed(rings: Path, file: int) -> None:
    need_root()
    path = rings / f"resilio-blocks-{os.geteuid()}-x"
    path.touch(0o600)
    os.chown(path, 65534, 65534)
    found = wanted()
    with closing(SharedBlocks("x", rings)) as one:
        assert one.read(opened(file).file, found) == []
        assert one._ring is None
    assert is_right(found)
    assert path.stat().st_size == 0
    path.unlink()
