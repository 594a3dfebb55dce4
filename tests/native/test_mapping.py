"""Mapping files in shared memory, and gathering their pages into huge ones."""

from __future__ import annotations

import gc
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.native import make_huge, map_shared

HUGE_PAGE = 2 << 20
SIZE = 4 * HUGE_PAGE + 12_345


@pytest.fixture
def file() -> Iterator[int]:
    """A file in shared memory, SIZE bytes of nothing."""
    with tempfile.TemporaryFile(dir="/dev/shm") as made:
        made.truncate(SIZE)
        yield made.fileno()


def mappings(fd: int) -> list[tuple[int, int]]:
    """Where this process has mapped the file: first and last address."""
    inode = os.fstat(fd).st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(rf"([0-9a-f]+)-([0-9a-f]+) (?:\S+ ){{3}}{inode} ", line) for line in lines]
    return [(int(at[1], 16), int(at[2], 16)) for at in found if at is not None]


def test_what_is_written_is_in_the_file_and_the_other_way_round(file: int) -> None:
    view = map_shared(file, SIZE, True)
    assert (len(view), view.format, view.readonly) == (SIZE, "B", False)
    view[SIZE - 3 :] = b"end"
    assert os.pread(file, 3, SIZE - 3) == b"end"
    os.pwrite(file, b"begin", 0)
    assert bytes(view[:5]) == b"begin"


def untouchable() -> set[tuple[int, int]]:
    """Addresses that are taken and not to be touched, as all are while a place is looked for: first and last."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [words[0].split("-") for words in lines if words[1] == "---p"]
    return {(int(first, 16), int(end, 16)) for first, end in ranges}


def test_it_begins_at_a_huge_page_and_takes_no_other_addresses(file: int) -> None:
    before = untouchable()
    views = [map_shared(file, SIZE, True) for _ in range(8)]
    assert all(first % HUGE_PAGE == 0 for first, _ in mappings(file))
    assert all(end - first == -(-SIZE // 4096) * 4096 for first, end in mappings(file))
    assert len(mappings(file)) == len(views)
    edges = {edge for ends in mappings(file) for edge in ends}
    left = [ends for ends in untouchable() - before if not edges.isdisjoint(ends)]
    assert left == [], "what was taken to find a place was given back"


def test_it_stays_for_as_long_as_anybody_has_a_part_of_it(file: int) -> None:
    view = map_shared(file, SIZE, True)
    part = view[HUGE_PAGE : HUGE_PAGE + 4]
    view.release()
    del view
    gc.collect()
    part[:] = b"kept"
    assert os.pread(file, 4, HUGE_PAGE) == b"kept"
    assert len(mappings(file)) == 1
    del part
    gc.collect()
    assert mappings(file) == []


def test_who_may_only_read_cannot_write(file: int) -> None:
    with open(f"/proc/self/fd/{file}", "rb") as only_read:
        view = map_shared(only_read.fileno(), 100, False)
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(PermissionError):
            map_shared(only_read.fileno(), 100, True)


@pytest.mark.parametrize("size", [0, -1, SIZE + 1])
def test_what_the_file_does_not_have_is_refused(size: int, file: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes of a file of {SIZE}"):
        map_shared(file, size, True)


def test_a_closed_file_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-1, 100, True)


def test_content_stays_when_pages_are_gathered(file: int) -> None:
    data = os.urandom(SIZE)
    os.pwrite(file, data, 0)
    view = map_shared(file, SIZE, True)
    make_huge(view)
    assert bytes(view) == data
    assert os.pread(file, SIZE, 0) == data


def test_a_hole_around_one_page_becomes_a_huge_page_of_zeros(file: int) -> None:
    os.pwrite(file, b"here", HUGE_PAGE + 8192)
    view = map_shared(file, SIZE, True)
    if not make_huge(view[HUGE_PAGE : 2 * HUGE_PAGE]):
        pytest.skip("this kernel gathers no huge pages (Linux 6.1), or has none left")
    assert os.fstat(file).st_blocks * 512 == HUGE_PAGE
    assert bytes(view[HUGE_PAGE : 2 * HUGE_PAGE]) == bytes(8192) + b"here" + bytes(HUGE_PAGE - 8196)


def test_what_cannot_be_gathered_is_told_and_nothing_else_happens(file: int, tmp_path: Path) -> None:
    assert not make_huge(map_shared(file, SIZE, True)), "nothing is there to be gathered"
    with (tmp_path / "file").open("w+b") as other:
        other.write(bytes(SIZE))
        other.flush()
        make_huge(map_shared(other.fileno(), SIZE, True))  # file systems differ
        assert (tmp_path / "file").read_bytes() == bytes(SIZE)
    assert make_huge(map_shared(file, SIZE, True)[:1000]), "less than one huge page needs none"
    with mmap.mmap(-1, 4096) as small:
        assert make_huge(small)
