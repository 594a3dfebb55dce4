"""Rings in memory, and a file whose blocks are read through them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ckpt.ring_readers import CONTENT


@pytest.fixture
def rings() -> Iterator[Path]:
    """A directory in memory for rings; nothing is left in it."""
    directory = Path(f"/dev/shm/test-rings-{os.getpid()}")
    directory.mkdir(mode=0o700)
    try:
        yield directory
        assert list(directory.iterdir()) == []
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


@pytest.fixture
def file(disk_path: Path) -> Iterator[int]:
    (disk_path / "shard").write_bytes(CONTENT)
    fd = os.open(disk_path / "shard", os.O_RDWR)
    yield fd
    os.close(fd)
