"""Large reads and writes: the right bytes in the right places, what is wrong found, and nothing left in flight."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilio_hpc.native import crc32c, direct_io
from tests.support.requirements import need_extensions

PAGE = 4096
SIZE = 300 * PAGE
CONTENT = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
ways = pytest.mark.parametrize(("concurrent", "direct"), [(True, True), (True, False), (False, True), (False, False)])


@pytest.fixture
def memory() -> mmap.mmap:
    room = mmap.mmap(-1, SIZE)
    room[:] = CONTENT.tobytes()
    return room


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    return path


def opened(path: Path, direct: bool) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)


def write(
    fd: int, memory: mmap.mmap, pieces: list[tuple[int, int, int]], concurrent: bool = True, depth: int = 4
) -> int:
    return direct_io.write(fd, memory, pieces, [], depth, 16 * PAGE, 0.0, concurrent)


def test_this_machine_moves_several_at_a_time() -> None:
    need_extensions()
    assert direct_io.is_concurrent(), "io_uring is not allowed here, so the tests of it test nothing"


@ways
@pytest.mark.parametrize("depth", [1, 3, 64])
def test_every_piece_is_written_to_its_place(
    memory: mmap.mmap, tmp_path: Path, concurrent: bool, direct: bool, depth: int
) -> None:
    fd = opened(tmp_path / "new", direct)
    pieces = [
        (0, 7 * PAGE, 100 * PAGE),
        (100 * PAGE, 200 * PAGE, 0),
        (200 * PAGE, 0, PAGE),
        (90 * PAGE, 150 * PAGE, 33 * PAGE),
    ]
    assert write(fd, memory, pieces, concurrent, depth) == -1
    os.close(fd)
    expected = np.zeros(183 * PAGE, dtype=np.uint8)
    for start, offset, size in pieces:
        expected[offset : offset + size] = CONTENT[start : start + size]
    assert np.array_equal(np.fromfile(tmp_path / "new", dtype=np.uint8), expected)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_block_that_does_not_match_is_named_before_it_is_written(memory: mmap.mmap, tmp_path: Path, bad: int) -> None:
    spans = [(5, 4000), (PAGE, 40 * PAGE), (200 * PAGE + 1, PAGE)]
    blocks = [
        (start, crc32c(CONTENT[start : start + size]) ^ (i == bad), size) for i, (start, size) in enumerate(spans)
    ]
    fd = opened(tmp_path / "new", True)
    assert direct_io.write(fd, memory, [(0, 0, SIZE)], blocks, 2, 16 * PAGE, 0.0, True) == bad
    assert os.fstat(fd).st_size <= spans[bad][0]
    os.close(fd)


def test_blocks_that_no_piece_holds_are_verified_too(memory: mmap.mmap, tmp_path: Path) -> None:
    fd = opened(tmp_path / "new", True)
    assert direct_io.write(fd, memory, [(0, 0, PAGE)], [(99 * PAGE, 1, PAGE)], 2, PAGE, 0.0, True) == 0
    assert direct_io.write(fd, memory, [], [(99 * PAGE, 1, PAGE)], 2, PAGE, 0.0, True) == 0
    os.close(fd)


@st.composite
def segments(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(offset, size), in order, without overlap, of all sizes and gaps."""
    edges = sorted(draw(st.lists(st.integers(0, SIZE), max_size=12)))
    kept = draw(st.lists(st.booleans(), min_size=12, max_size=12))
    return [(low, high - low) for low, high, keep in zip(edges, edges[1:], kept, strict=False) if keep]


@ways
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(segments(), st.sets(st.integers(0, 11)), st.integers(1, 5), st.sampled_from([PAGE, 3 * PAGE, 64 * PAGE]))
def test_every_segment_is_read_and_those_that_do_not_match_are_named(
    path: Path, concurrent: bool, direct: bool, wanted: list[tuple[int, int]], bad: set[int], depth: int, chunk: int
) -> None:
    targets = [np.zeros(size, dtype=np.uint8) for _, size in wanted]
    what = [
        (offset, target, crc32c(CONTENT[offset : offset + size]) ^ (i in bad))
        for i, ((offset, size), target) in enumerate(zip(wanted, targets, strict=True))
    ]
    fd, cached = opened(path, direct), opened(path, False)
    for read in (
        lambda: direct_io.read(fd, what, depth, chunk, concurrent),
        lambda: direct_io.read_cached(cached, what, chunk),
    ):
        for target in targets:
            target[:] = 0
        assert read() == sorted(bad & set(range(len(wanted))))
        for (offset, size), target in zip(wanted, targets, strict=True):
            assert np.array_equal(target, CONTENT[offset : offset + size])
    os.close(fd)
    os.close(cached)


@ways
def test_a_file_that_ends_too_early_is_an_error_and_one_that_ends_within_a_page_is_not(
    path: Path, concurrent: bool, direct: bool
) -> None:
    os.truncate(path, SIZE - 100)
    fd = opened(path, direct)
    target = np.zeros(5000, dtype=np.uint8)
    good = crc32c(CONTENT[SIZE - 5100 : SIZE - 100])
    assert direct_io.read(fd, [(SIZE - 5100, target, good)], 2, PAGE, concurrent) == []
    for offset in (SIZE - 5099, SIZE, 10 * SIZE):
        with pytest.raises(OSError) as caught:
            direct_io.read(fd, [(offset, target, good)], 2, PAGE, concurrent)
        assert caught.value.errno == errno.ENODATA
    os.close(fd)


def test_what_lies_in_the_page_cache_ends_as_the_file_does(path: Path) -> None:
    fd = opened(path, False)
    os.truncate(path, SIZE - 100)
    with pytest.raises(OSError) as caught:
        direct_io.read_cached(fd, [(SIZE - 5000, bytearray(4901), 0)], PAGE)
    assert caught.value.errno == errno.ENODATA
    os.close(fd)
    with pytest.raises(OSError) as caught:
        direct_io.read_cached(9999, [(0, bytearray(1), 0)], PAGE)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("concurrent", [True, False])
def test_what_a_file_system_refuses_is_an_error(memory: mmap.mmap, disk_path: Path, concurrent: bool) -> None:
    fd = opened(disk_path / "new", True)
    with pytest.raises(OSError) as caught:
        write(fd, memory, [(0, 17, SIZE - 17)], concurrent)
    assert caught.value.errno == errno.EINVAL
    os.close(fd)
    with pytest.raises(OSError) as caught:
        write(9999, memory, [(0, 0, SIZE)], concurrent)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_limit_in_the_middle_of_a_write_is_an_error(tmp_path: Path, concurrent: bool) -> None:
    """As a full disk is: some of what was in flight succeeds, some does not."""
    code = f"""
import errno, mmap, os, resource, signal, sys
from resilio_hpc.native import direct_io
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({50 * PAGE}, {50 * PAGE}))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
try:
    direct_io.write(fd, mmap.mmap(-1, {SIZE}), [(0, 0, {SIZE})], [], 8, {16 * PAGE}, 0.0, {concurrent})
except OSError as error:
    print(errno.errorcode[error.errno], os.fstat(fd).st_size)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "new"], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["EFBIG", str(50 * PAGE)], "")


def test_a_bandwidth_is_kept(memory: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = opened(tmp_path / "new", True)
    began = time.monotonic()
    for half in range(2):
        part = (half * SIZE // 2, half * SIZE // 2, SIZE // 2)
        direct_io.write(fd, memory, [part], [], 4, 32 * PAGE, 4.0 * SIZE, True)
    assert time.monotonic() - began >= 0.25
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1039, 1040, 1100, 5000, 70_003])
@pytest.mark.parametrize("shift", [0, 1, 15, 16, 40])
def test_segments_of_memory_are_copied_to_wherever_they_belong(memory: mmap.mmap, size: int, shift: int) -> None:
    target = np.full(shift + size + 64, 7, dtype=np.uint8)
    room = memoryview(target)[shift : shift + size]
    direct_io.copy_segments(memory, [(33, room, 0)])
    assert target[:shift].tolist() == [7] * shift
    assert np.array_equal(target[shift : shift + size], CONTENT[33 : 33 + size])
    assert target[shift + size :].tolist() == [7] * 64


def test_many_threads_read_the_same_file(path: Path) -> None:
    fd = opened(path, True)

    def read(first: int) -> bool:
        target = np.zeros(SIZE - first, dtype=np.uint8)
        return direct_io.read(fd, [(first, target, crc32c(CONTENT[first:]))], 4, 8 * PAGE, True) == []

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(0, 5000, 50)))
    os.close(fd)


def bad_calls(memory: mmap.mmap) -> Iterator[tuple[str, tuple[object, ...]]]:
    yield "write", (0, memory, [(0, 0, SIZE + 1)], [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [(SIZE, 0, 1)], [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [(-1, 0, 1)], [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [(0, 0)], [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, 5, [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [5], [], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [], [(0, 0, SIZE + 1)], 4, PAGE, 0.0, True)
    yield "write", (0, memory, [], [], 0, PAGE, 0.0, True)
    yield "write", (0, memory, [], [], 65, PAGE, 0.0, True)
    yield "write", (0, memory, [], [], 4, 100, 0.0, True)
    yield "read", (0, [(5, bytearray(3), 0), (7, bytearray(3), 0)], 4, PAGE, True)
    yield "read", (0, [(-1, bytearray(3), 0)], 4, PAGE, True)
    yield "read", (0, [(5, b"read-only", 0)], 4, PAGE, True)
    yield "read", (0, [(5, bytearray(3), 0), 5], 4, PAGE, True)
    yield "read", (0, [(5, bytearray(3), 0), (9,)], 4, PAGE, True)
    yield "read", (0, [(5, bytearray(3), "0")], 4, PAGE, True)
    yield "read", (0, [], 4, 1 << 31, True)
    yield "read_cached", (0, [(5, bytearray(3), 0), (7, bytearray(3), 0)], PAGE)
    yield "read_cached", (0, [(5, b"read-only", 0)], PAGE)
    yield "read_cached", (0, [], 100)
    yield "copy_segments", (memory, [(5, bytearray(3), 0), (7, bytearray(3), 0)])
    yield "copy_segments", (memory, [(-1, bytearray(3), 0)])
    yield "copy_segments", (memory, [(5, b"read-only", 0)])
    yield "copy_segments", (0, [])
    for offset in (SIZE - 2, SIZE, 10 * SIZE, 1 << 60):
        yield "copy_segments", (memory, [(0, bytearray(3), 0), (offset, bytearray(3), 0)])


def test_what_makes_no_sense_is_refused(memory: mmap.mmap) -> None:
    for name, arguments in bad_calls(memory):
        with pytest.raises((ValueError, TypeError)):
            getattr(direct_io, name)(*arguments)


def test_nothing_is_kept_after_errors(memory: mmap.mmap, disk_path: Path) -> None:
    """Neither memory nor rings (each is a file descriptor)."""
    path = disk_path / "new"
    path.touch()
    before, open_before = 0, len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for turn in range(300):
        fd = opened(path, True)
        with pytest.raises(OSError):
            write(fd, memory, [(0, 17, SIZE - 17)])
        with pytest.raises(OSError):
            direct_io.read(fd, [(0, bytearray(1 << 20), 0)], 8, 1 << 20, True)
        os.close(fd)
        for name, arguments in bad_calls(memory):
            with pytest.raises((ValueError, TypeError)):
                getattr(direct_io, name)(*arguments)
        if turn == 50:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10
    assert len(os.listdir("/proc/self/fd")) <= open_before  # noqa: PTH208
    memory.close()  # no reference to it is left


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_that_hangs(tmp_path: Path) -> None:
    code = (
        "import mmap, os, sys\nfrom resilio_hpc.native import direct_io\nroom = mmap.mmap(-1, 64 << 20)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)\nprint('ready', flush=True)\n"
        "while True:\n direct_io.write(fd, room, [(0, 0, 64 << 20)], [], 16, 1 << 20, 0.0, True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "new"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    process.stdout.close()


def test_what_the_kernel_never_takes_up_is_taken_back_and_done_by_hand() -> None:
    """An empty pipe in its place, which nobody will ever fill; by hand it is refused, since it has no places."""
    need_extensions()
    read, write = os.pipe()
    began = time.monotonic()
    with pytest.raises(OSError) as caught:
        direct_io.read(read, [(0, memoryview(bytearray(5 * PAGE)), 0)], 4, PAGE, True, 0.2)
    assert caught.value.errno == errno.ESPIPE
    assert time.monotonic() - began > 0.1  # it was in the kernel's hands
    os.close(read)
    os.close(write)
