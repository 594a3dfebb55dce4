"""Large files where the page cache can be passed by, and where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import Block, PageRun, Segment
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c

CONTENT = np.random.default_rng(2).integers(0, 256, 40 * PAGE, dtype=np.uint8)
GOOD = crc32c(CONTENT)


def open_file(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)


def refuse(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A file system that does not open files so."""
    real = os.open

    def opened(path: object, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    if refused:
        refuse(monkeypatch, errno.EINVAL)
    fd = open_file(tmp_path)
    memory, target = memoryview(CONTENT.copy()), np.zeros_like(CONTENT)  # numpy aligns to 16 bytes only
    assert bulk_io.write(fd, memory, [PageRun(0, 0, len(memory))], [Block(0, GOOD, len(memory))]) is None
    assert bulk_io.write(fd, memory, [], [Block(1, GOOD, PAGE)]) == 0
    assert bulk_io.read(fd, [Segment(0, memoryview(target), GOOD)]) == []
    assert np.array_equal(target, CONTENT)
    assert bulk_io.read(fd, [Segment(1, memoryview(target)[:-1], GOOD)], direct=False) == [0]
    os.close(fd)


def test_pieces_that_direct_writes_cannot_take_go_through_the_cache(tmp_path: Path) -> None:
    fd = open_file(tmp_path)
    memory = memoryview(CONTENT.copy())
    assert bulk_io.write(fd, memory, [PageRun(3, 5, 10_000)], []) is None
    assert os.pread(fd, 10_000, 5) == CONTENT[3:10_003].tobytes()
    os.close(fd)


def test_segments_that_overlap_come_from_a_hostile_table(tmp_path: Path) -> None:
    fd = open_file(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="share bytes"):
        bulk_io.read(fd, [Segment(0, memoryview(bytearray(9)), 0), Segment(8, memoryview(bytearray(9)), 0)])
    os.close(fd)


def test_other_errors_are_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = open_file(tmp_path)
    with pytest.raises(OSError) as caught:
        bulk_io.read(fd, [Segment(0, memoryview(bytearray(10)), 0)])
    assert caught.value.errno == errno.ENODATA
    refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError) as caught:
        bulk_io.write(fd, memoryview(CONTENT), [], [])
    assert caught.value.errno == errno.EIO
    os.close(fd)
