"""Readers of common blocks through a ring in memory, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt.format.bulk_io import Segment
from resilio_hpc.native import crc32c
from tests.support.waiting import PATIENCE_S

BLOCK = 1 << 20
CONTENT = np.random.default_rng(1).bytes(24 * BLOCK)


def wanted(numbers: Any = range(24), shift: int = 0) -> list[Segment]:
    """Whole blocks, ``shift`` bytes behind the beginning of the file."""
    found = []
    for number in numbers:
        data = CONTENT[shift + number * BLOCK :][:BLOCK]
        found.append(Segment(shift + number * BLOCK, memoryview(bytearray(len(data))), crc32c(data)))
    return found


def is_right(segments: list[Segment]) -> bool:
    return all(bytes(one.target) == CONTENT[one.offset : one.offset + len(one.target)] for one in segments)


def together(*acts: Callable[[], None]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read past the page cache."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(fd: int, rooms: Any, offset: int) -> int:
        sizes.append(preadv(fd, rooms, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


READER = """
import os, sys, time
from pathlib import Path
from resilio_hpc.ckpt.restore import shared_blocks
from resilio_hpc.ckpt.format.bulk_io import Segment
from resilio_hpc.ckpt.store.posix import PosixFile
from resilio_hpc.native import crc32c
rings, path, act = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
content = Path(path).read_bytes()
file = PosixFile(os.open(path, os.O_RDONLY))
blocks = shared_blocks.SharedBlocks("x", rings)
if act == "claim":  # begins to read, and does not come to an end
    preadv = os.preadv
    def stuck(*arguments):
        print("reads", flush=True)
        time.sleep(1000)
    os.preadv = stuck
sys.stdin.readline()
for _ in range(20):
    found = [Segment(at, memoryview(bytearray(1 << 20)), crc32c(content[at : at + (1 << 20)]))
             for at in range(0, len(content), 1 << 20)]
    for share in range(0, len(found), 8):
        assert blocks.read(file, found[share : share + 8]) == []
    assert all(bytes(one.target) == content[one.offset : one.offset + len(one.target)] for one in found)
blocks.close()
print("done", flush=True)
"""


def reader(rings: Path, disk_path: Path, act: str = "read") -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", READER, str(rings), str(disk_path / "shard"), act]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return process
