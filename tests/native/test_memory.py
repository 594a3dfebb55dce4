"""Checksums against published vectors, and copies that change nothing but the target."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc import native
from resilio_hpc.native import _memory

VECTORS = [  # RFC 3720 appendix B.4, and the check value of CRC-32C
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.fixture(params=[0, 1, 2], ids=["tables", "crc32", "folding"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """Whatever processor these run on, each of its ways to compute checksums is tried."""
    wanted: int = request.param
    if wanted > _memory.available:
        pytest.skip("this processor has no such instructions")
    _memory.use(wanted)
    yield wanted
    _memory.use(_memory.available)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_checksum_gives_the_published_values(data: bytes, expected: int) -> None:
    assert native.crc32c(data) == expected
    assert native.crc32c_portable(data) == expected
    assert native.copy_crc32c(bytearray(len(data)), data) == expected


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    "size", [1, 7, 8, 127, 128, 129, 256, 767, 768, 769, 12287, 12288, 12289, 262_143, 262_144, 300_001, 1 << 20]
)
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_hardware_and_portable_agree_and_the_copy_is_exact(size: int, offset: int) -> None:
    source = os.urandom(size + offset)
    target = bytearray(b"\xaa" * (size + offset + 16))
    with memoryview(source) as view, memoryview(target) as room:
        crc = native.copy_crc32c(room[offset : offset + size], view[offset:])
    assert crc == native.crc32c_portable(memoryview(source)[offset:]) == native.crc32c(memoryview(source)[offset:])
    assert target[offset : offset + size] == source[offset:]
    assert target[:offset] == b"\xaa" * offset
    assert target[offset + size :] == b"\xaa" * 16


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("ahead", [0, 1, 16, 32, 63, 64, 112, 128, 4080])
def test_a_copy_is_exact_wherever_in_its_page_the_target_lies(ahead: int) -> None:
    size = 300_001
    with mmap.mmap(-1, 2 << 20) as source, mmap.mmap(-1, 2 << 20) as target:
        source[:size] = os.urandom(size)
        with memoryview(source) as view, memoryview(target) as room:
            crc = native.copy_crc32c(room[ahead : ahead + size], view[:size])
        assert crc == native.crc32c_portable(source[:size])
        assert target[ahead : ahead + size] == source[:size]
        assert not any(target[:ahead]) and not any(target[ahead + size :])


@pytest.mark.usefixtures("instructions")
def test_a_checksum_tells_any_bit_that_is_changed() -> None:
    data = bytearray(os.urandom(1500))
    right = native.crc32c(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert native.crc32c(data) != right
        data[bit // 8] ^= 1 << bit % 8
    assert native.crc32c(data) == right


@pytest.mark.parametrize("wanted", [-1, 3])
def test_instructions_that_there_are_not_are_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match="not among the processor's"):
        _memory.use(wanted)


@pytest.mark.parametrize("wanted", range(_memory.available + 1))
@given(data=st.binary(max_size=5000), cut=st.integers(0, 5000), start=st.integers(0, (1 << 32) - 1))
def test_a_checksum_continues_where_another_ended(wanted: int, data: bytes, cut: int, start: int) -> None:
    _memory.use(wanted)
    try:
        whole, parts = native.crc32c(data, start), native.crc32c(data[cut:], native.crc32c(data[:cut], start))
    finally:
        _memory.use(_memory.available)
    assert whole == parts == native.crc32c_portable(data, start)


def test_sizes_that_differ_are_refused_and_nothing_is_written() -> None:
    target = bytearray(4)
    with pytest.raises(ValueError, match="target has 4 bytes, source has 5"):
        native.copy_crc32c(target, b"12345")
    assert target == bytes(4)


def test_a_read_only_target_is_refused() -> None:
    with pytest.raises(TypeError):
        native.copy_crc32c(b"1234", b"5678")


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=8), st.integers(0, 63))
def test_blocks_go_where_they_belong_each_with_its_checksum(parts: list[tuple[int, int]], gap: int) -> None:
    blocks, sources, at = [], [], gap
    for start, size in parts:
        source = os.urandom(start + size)
        sources.append(source[start:])
        blocks.append((at, source, start, size))
        at += size + gap
    target = bytearray(b"\xaa" * (at + 1))
    assert native.copy_blocks(target, blocks) == [native.crc32c_portable(source) for source in sources]
    filler = b"\xaa" * gap
    assert target == filler + b"".join(source + filler for source in sources) + b"\xaa"


@pytest.mark.parametrize(
    ("at", "start", "size"),
    [(0, 0, 9), (5, 0, 4), (-1, 0, 1), (0, -1, 1), (0, 3, 6), (0, 0, -1), (1 << 62, 1 << 62, 1)],
)
def test_a_block_outside_of_source_or_target_is_refused_and_nothing_is_written(at: int, start: int, size: int) -> None:
    target = bytearray(8)
    with pytest.raises(ValueError, match="copy_blocks"):
        native.copy_blocks(target, [(0, b"12345678", 0, 8), (at, b"12345678", start, size)])
    assert target == bytes(8)


@pytest.mark.parametrize("block", [(0, "text", 0, 1), (0, b"x", 0), [0, b"x", 0, 1], None])
def test_what_is_no_block_is_refused(block: object) -> None:
    with pytest.raises(TypeError):
        native.copy_blocks(bytearray(8), [block])  # type: ignore[list-item]


def test_populate_keeps_the_content() -> None:
    with mmap.mmap(-1, 1 << 20) as mapping:
        mapping[5000:5003] = b"abc"
        native.populate(mapping)
        assert mapping[5000:5003] == b"abc"
        assert mapping[:5000] == bytes(5000)


@pytest.mark.parametrize("touched", [0, 3, 2048])  # pages
def test_populate_missing_leaves_no_page_to_fault(touched: int) -> None:
    pages = 2 * 4096 + 17
    with mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        for number in range(touched):
            mapping[number * 4096 * 3 + 5] = 7
        native.populate_missing(mapping)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for number in range(pages):
            mapping[number * 4096] = 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200
        assert all(mapping[number * 4096 * 3 + 5] == 7 for number in range(touched))


OLD_KERNEL = """
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
int madvise(void *address, size_t size, int advice) {
    if (advice != 22 && advice != 23) return (int)syscall(SYS_madvise, address, size, advice);
    errno = EINVAL;
    return -1;
}
"""
FILL_BESIDE_IT = """
import mmap, threading
import numpy
from resilio_hpc import native
for turn in range(150):
    mapping = mmap.mmap(-1, 8 << 20)
    both = threading.Barrier(2)
    def populate():
        both.wait()
        native.populate(mapping)
    thread = threading.Thread(target=populate)
    thread.start()
    filled = numpy.frombuffer(mapping, dtype=numpy.uint8)
    both.wait()
    filled[:] = 255
    thread.join()
    assert (filled == 255).all(), turn
"""


def test_before_linux_5_14_too_it_takes_nothing_from_a_thread_that_fills_the_same_memory(tmp_path: Path) -> None:
    (tmp_path / "old.c").write_text(OLD_KERNEL)
    library = tmp_path / "old.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, tmp_path / "old.c"], check=True, timeout=60)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", FILL_BESIDE_IT], env=environment, check=True, timeout=200)


def test_pages_that_can_only_be_read_are_mapped_too() -> None:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.pwrite(fd, b"x" * 100_000, 50_000)
    with mmap.mmap(fd, 150_000, prot=mmap.PROT_READ) as mapping:
        native.populate(mapping)
        assert mapping[49_999:50_001] == b"\0x"
        assert resident(fd) >= 144
    os.close(fd)


def resident(fd: int) -> int:
    """KiB of our mapping of a file."""
    inode = os.fstat(fd).st_ino
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if f" {inode} " in line:
            return next(int(row.split()[1]) for row in lines if row.startswith("Rss:"))
    raise AssertionError("it is not mapped")


def test_who_waits_for_a_word_is_woken_by_another_process() -> None:
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))  # shared with a child
    child = os.fork()
    if child == 0:
        try:
            while memory[4] == 0:
                native.await_word(memory, 4, 0, 60.0)
            native.change_word(memory, 8)
        finally:
            os._exit(0)
    began = time.monotonic()
    native.await_word(memory, 8, 0, 0.05)  # nobody is woken so far
    assert 0.04 < time.monotonic() - began < 30
    native.change_word(memory, 4)
    while memory[8] == 0:
        native.await_word(memory, 8, 0, 60.0)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 30


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    memory = bytearray(8)
    memory[4:] = (0xFFFFFFFF).to_bytes(4, sys.byteorder)
    began = time.monotonic()
    native.await_word(memory, 4, 0, 60.0)
    native.change_word(memory, 4)  # past its end
    native.await_word(memory, 4, 0xFFFFFFFF, 60.0)
    assert time.monotonic() - began < 30
    assert memory[:4] == bytes(4)
    assert memory[4:] != b"\xff" * 4


@pytest.mark.parametrize("at", [-4, 5, 6, 2**62])
def test_a_word_that_is_none_is_refused(at: int) -> None:
    memory = memoryview(mmap.mmap(-1, 8))
    for call in (lambda: native.await_word(memory, at, 0, 0.0), lambda: native.change_word(memory, at)):
        with pytest.raises(ValueError, match="there is no word at byte"):
            call()
