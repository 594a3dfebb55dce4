"""The same functions in Python, for where there is no compiler: each does to the bit what its extension does."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilio_hpc import native
from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.native.portable import checksum, direct_io, mapping, memory
from tests.support.environments import ROOT
from tests.support.requirements import need_extensions
from tests.support.waiting import PATIENCE_S

PAGE = 4096
CONTENT = np.random.default_rng(2).integers(0, 256, 9 << 20, dtype=np.uint8)
DEGREE = (
    5685  # bytes: from this size on, a power of the sparse multiple is used; the next ones at 4 and 32 times as many
)
SIZES = [
    0,
    1,
    3,
    4,
    5,
    7,
    100,
    *(DEGREE * scale + more for scale in (1, 4, 32) for more in (-1, 0, 1, 9)),
    (4 << 20) + 2,
]
Box = tuple[int, int, int, tuple[tuple[int, int, int], ...]]


@pytest.fixture(autouse=True)
def _extensions() -> None:
    need_extensions()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 1, 0xFFFFFFFF, 0xDEADBEEF])
def test_checksums_are_those_of_the_extension(size: int, start: int) -> None:
    data = CONTENT[13 : 13 + size]
    assert checksum.crc32c(data, start) == native.crc32c(data, start)


@given(st.binary(max_size=300), st.integers(0, 0xFFFFFFFF), st.integers(1, 200))
def test_checksums_of_small_data_too(data: bytes, start: int, times: int) -> None:
    data *= times
    assert checksum.crc32c(data, start) == native.crc32c(data, start) == checksum.crc32c_portable(data, start)


def test_a_checksum_leaves_its_data_as_it_was_and_takes_any_contiguous_memory() -> None:
    data = np.arange(60_000, dtype="<f4").reshape(200, 300)
    before = data.copy()
    assert checksum.crc32c(data) == native.crc32c(data)
    assert np.array_equal(data, before)
    for refused in ("text", 5, data[:, ::2]):
        with pytest.raises((TypeError, BufferError)):
            checksum.crc32c(refused)  # type: ignore[arg-type]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, int, int]:
    """A box, and the sizes of its tensor and its target."""
    run = draw(st.integers(1, 20))
    first, target_first = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    source, target = run, run
    levels: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 5))
        steps = source + draw(st.sampled_from([0, 1, 7])), target + draw(st.sampled_from([0, 3]))
        levels.insert(0, (count, *steps))
        source, target = source + (count - 1) * steps[0], target + (count - 1) * steps[1]
    return (first, target_first, run, tuple(levels)), first + source, target_first + target


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(boxes(), st.lists(st.integers(0, 2000), max_size=4), st.integers(0, 9000), st.sampled_from([PAGE, 8 * PAGE]))
def test_boxes_go_where_the_extension_puts_them(
    tmp_path: Path, box: tuple[Box, int, int], cuts: list[int], offset: int, chunk: int
) -> None:
    strides, size, room = box
    path = tmp_path / "file"
    path.write_bytes(CONTENT[: offset + size].tobytes())
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    fd = os.open(path, os.O_RDONLY)
    targets = []
    for one in (native.direct_io, direct_io):
        for act in (
            lambda segments, one=one: one.read(fd, segments, 2, chunk, True),
            lambda segments, one=one: one.read_cached(fd, segments, chunk),
            lambda segments, one=one: one.copy_segments(CONTENT, segments),
        ):
            target = np.full(room, 7, dtype=np.uint8)
            parts = [(low, high - low) for low, high in pairwise(edges)]
            crcs = [native.crc32c(CONTENT[offset + at : offset + at + count]) for at, count in parts]
            segments = [
                (offset + at, target, crc, count, at, strides) for (at, count), crc in zip(parts, crcs, strict=True)
            ]
            assert act(segments) in (None, [])
            targets.append(target)
    os.close(fd)
    assert all(np.array_equal(target, targets[0]) for target in targets)


UNSOUND = [
    (-1, 0, 4, ((2, 8, 4),)),
    (0, -1, 4, ((2, 8, 4),)),
    (0, 0, 0, ((2, 8, 4),)),
    (0, 0, 4, ((0, 8, 4),)),
    (0, 0, 4, ((2, 3, 4),)),
    (0, 0, 4, ((2, 8, -4),)),
    (0, 0, 4, ((1 << 62, 1 << 62, 1 << 62),)),
    (0, 93, 4, ((2, 8, 4),)),
    (0, 0, 4, ()),
    (0, 0, 4, ((1, 4, 4),) * 33),
    (0, 0, 4, ((2, 8),)),
    (0, 0, 4, [(2, 8, 4)]),
    (0, 0, 4),
]


@pytest.mark.parametrize("box", UNSOUND)
def test_a_box_that_is_unsound_is_refused_by_both(box: Any) -> None:
    for one in (native.direct_io, direct_io):
        with pytest.raises((ValueError, TypeError)):
            one.copy_segments(CONTENT, [(0, bytearray(100), 0, 50, 0, box)])


def test_thirty_two_levels_are_copied() -> None:
    box = (0, 0, 2, ((1, 6, 4),) * 31 + ((2, 4, 2),))
    targets = [bytearray(4), bytearray(4)]
    for one, target in zip((native.direct_io, direct_io), targets, strict=True):
        one.copy_segments(CONTENT, [(0, target, 0, 8, 0, box)])
    assert targets[0] == targets[1] == CONTENT[[0, 1, 4, 5]].tobytes()


@contextmanager
def mapped(one: Any, writable: bool = True) -> Iterator[memoryview]:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.pwrite(fd, CONTENT[: 5 << 20].tobytes(), 0)
    view = one.map_shared(fd, 5 << 20, writable)
    os.close(fd)
    yield view


def test_a_mapping_outlives_its_file_and_view_and_ends_with_its_last_part() -> None:
    with mapped(mapping) as view:
        part = view[100:200]
        view.release()
        assert bytes(part) == CONTENT[100:200].tobytes()
    before = Path("/proc/self/maps").read_text().count("(deleted)")
    del part, view
    assert Path("/proc/self/maps").read_text().count("(deleted)") == before - 1


def test_a_mapping_keeps_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with mapped(mapping) as view:
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert len(view) == 5 << 20


def test_a_word_wakes_those_who_wait_with_the_extension_and_the_other_way_round() -> None:
    room = memoryview(mmap.mmap(-1, PAGE))
    for waits, changes in ((native, memory), (memory, native)):
        seen = int.from_bytes(room[4:8], sys.byteorder)
        thread = threading.Thread(target=lambda waits=waits, seen=seen: _wait(waits, room, seen))
        thread.start()
        changes.change_word(room, 4)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert int.from_bytes(room[4:8], sys.byteorder) != seen
    assert bytes(room[:4]) + bytes(room[8:12]) == bytes(8)


def _wait(one: Any, room: memoryview, seen: int) -> None:
    while int.from_bytes(room[4:8], sys.byteorder) == seen:
        one.await_word(room, 4, seen, 60.0)


def test_no_change_of_a_word_is_lost_to_another_one() -> None:
    """Two processes that read the same number and write theirs: the one that saw the first sees that it has changed."""
    room = bytearray(8)
    drawn = set()
    for _ in range(50):
        room[:] = bytes(8)
        memory.change_word(room, 0)
        drawn.add(bytes(room[:4]))
    assert len(drawn) > 45
    assert bytes(4) not in drawn


def test_a_wait_has_a_limit() -> None:
    began = time.monotonic()
    memory.await_word(bytearray(8), 4, 0, 0.05)
    assert 0.04 < time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("direct", [True, False])
def test_both_write_and_read_what_the_other_did(disk_path: Path, direct: bool) -> None:
    room = mmap.mmap(-1, 9 << 20)
    room[:] = CONTENT.tobytes()
    blocks = [(at, native.crc32c(CONTENT[at : at + (1 << 20)]), 1 << 20) for at in range(0, 9 << 20, 1 << 20)]
    for writes, reads in ((native.direct_io, direct_io), (direct_io, native.direct_io)):
        fd = os.open(disk_path / "new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o600)
        assert writes.write(fd, room, [(0, PAGE, 9 << 20)], blocks, 4, 1 << 20, 0.0, True) == -1
        target = np.zeros(9 << 20, dtype=np.uint8)
        segments = [(at + PAGE + 5, target[at + 5 : at + (1 << 20)], 0) for at, _, _ in blocks]
        bad = reads.read(fd, segments, 4, 256 << 10, True)
        assert bad == list(range(len(blocks)))  # none has the checksum 0
        assert all(
            np.array_equal(target[at + 5 : at + (1 << 20)], CONTENT[at + 5 : at + (1 << 20)]) for at, _, _ in blocks
        )
        os.close(fd)


def test_a_damaged_block_is_not_written() -> None:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    assert direct_io.write(fd, CONTENT, [(0, 0, 1 << 20)], [(PAGE, 1, PAGE)], 1, PAGE, 0.0, True) == 0
    assert os.fstat(fd).st_size == PAGE
    os.close(fd)
    with pytest.raises(OSError) as caught:
        direct_io.write(fd, CONTENT, [(0, 0, 1 << 20)], [], 1, PAGE, 0.0, True)
    assert caught.value.errno == errno.EBADF


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


def test_the_choice_is_made_once_for_all_functions_and_says_why() -> None:
    program = (
        "from resilio_hpc import native; print(native.why_portable, native.crc32c.__module__,"
        " native.direct_io.__name__, native.map_shared.__module__, sep=';')"
    )
    room = "resilio_hpc.native.portable"
    without = python(program, RESILIO_NO_NATIVE="1").split(";")
    assert without == ["RESILIO_NO_NATIVE is set", f"{room}.checksum", f"{room}.direct_io", f"{room}.mapping"]
    assert python(program, RESILIO_NO_NATIVE="0").startswith(";resilio_hpc.native._memory;")


def test_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    state = {"large": CONTENT.view("<u2")[: 1 << 21], "odd": CONTENT[:77].reshape(7, 11), "step": 5}
    Checkpointer(tmp_path / "built").save(5, state).wait()
    program = f"""
import numpy as np
from resilio_hpc.ckpt import Checkpointer
step, state = Checkpointer({str(tmp_path / "built")!r}, memory=False).restore()
Checkpointer({str(tmp_path / "portable")!r}).save(step + 1, state).wait()
"""
    python(program, RESILIO_NO_NATIVE="1")
    restored = Checkpointer(tmp_path / "portable", memory=False).restore()
    assert restored is not None
    assert restored[0] == 6
    assert restored[1].keys() == state.keys()
    assert restored[1]["step"] == 5
    assert all(np.array_equal(restored[1][name], state[name]) for name in ("large", "odd"))


@pytest.mark.slow
def test_the_tests_of_checkpoints_pass_without_extensions() -> None:
    names = "arena block_table bulk_io damaged_files refused_restores round_trip shared_blocks slab_reader slabs verify"
    files = [*(f"tests/ckpt/test_{name}.py" for name in names.split()), "tests/native", "tests/ckpt/crash"]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not slurm", *files]
    environment = {**os.environ, "RESILIO_NO_NATIVE": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
