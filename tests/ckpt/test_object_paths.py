"""What needs no object store: URLs, a run's link, parts of a file that is written, what is said without boto3."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt.format.bulk_io import Block, PageRun
from resilio_hpc.ckpt.store.mounts import linked_url
from resilio_hpc.ckpt.store.s3_bucket import S3Bucket
from resilio_hpc.ckpt.store.s3_client import THREADS
from resilio_hpc.ckpt.store.s3_files import PART_BYTES, S3NewFile, in_parallel
from resilio_hpc.ckpt.store.urls import checkpoints_path, store_url
from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.rundir import checkpoint_link
from resilio_hpc.native import crc32c
from tests.support.environments import ROOT


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/run", "s3://bucket/run"), ("s3://bucket", "s3://bucket"), ("s3://bucket//run/", "s3://bucket/run"),
        ("s3:/bucket/run", "s3://bucket/run"), ("/s3:/bucket/a/b", "s3://bucket/a/b"), ("s3://bucket/../x", ""),
        ("s3://Bucket/x", ""), ("s3:bucket", ""), ("gs://bucket/x", ""), ("/plain/s3", ""),
    ],
)  # fmt: skip
def test_a_url_is_known_by_its_text_and_by_its_path(given: str, url: str) -> None:
    assert store_url(given) == url
    if url:
        assert checkpoints_path(given, "x") == Path("/s3:", *url.removeprefix("s3://").split("/"))


def test_other_urls_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mount what is behind that URL.*Checkpoints may also go to s3:"):
        checkpoints_path("gs://bucket/x", "x")


def test_a_run_keeps_the_directory_that_it_began_with(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint_link.link(run, str(other))
    checkpoint_link.link(run, str(other))
    assert (run / "checkpoints").resolve() == other
    assert linked_url(run / "checkpoints") == ""
    with pytest.raises(UsageError, match="keeps its checkpoints in"):
        checkpoint_link.link(run, "s3://bucket/x")
    (tmp_path / "old" / "checkpoints" / "step-0000000001").mkdir(parents=True)
    with pytest.raises(UsageError, match="has checkpoints already"):
        checkpoint_link.link(tmp_path / "old", str(other))


def test_without_boto3_one_line_says_what_to_install() -> None:
    hidden = "import sys\nsys.modules['boto3'] = None\nfrom resilio_hpc.cli.main import main\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}sys.exit(main(['ckpt', 'ls', 's3://bucket/x']))"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "resilio: error: an object store (s3://…) needs boto3: pip install 'resilio_hpc[s3]'\n"


class _Kept:
    """The part of boto3's client that a new file uses; it keeps what it gets, and refuses all else."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.whole: bytes | None = None

    def create_multipart_upload(self, **where: Any) -> Any:
        return {"UploadId": "u"}

    def upload_part(self, Body: bytearray, PartNumber: int, **where: Any) -> Any:
        self.parts[PartNumber] = bytes(Body)
        return {"ETag": str(PartNumber)}

    def complete_multipart_upload(self, MultipartUpload: Any, **where: Any) -> Any:
        numbers = [one["PartNumber"] for one in MultipartUpload["Parts"]]
        assert [one["ETag"] for one in MultipartUpload["Parts"]] == [str(number) for number in numbers]
        self.whole = b"".join(self.parts[number] for number in numbers)
        return {"ETag": "whole"}

    def put_object(self, Body: bytearray, **where: Any) -> Any:
        self.whole = bytes(Body)
        return {}


def test_parts_of_a_file_are_sent_in_order_and_small_writes_wait_in_them() -> None:
    kept, size = _Kept(), 2 * PART_BYTES + 12_345
    file = S3NewFile(S3Bucket("b", kept), "key")
    expected = bytearray(size)

    def small(data: bytes, offset: int) -> None:
        file.write_small(memoryview(data), offset)
        expected[offset : offset + len(data)] = data

    file.allocate(size)
    small(b"head", 0)
    small(b"across", PART_BYTES - 3)
    small(b"end", size - 3)
    assert file.pread(6, PART_BYTES - 3) == b"across"
    assert file.pread(100, size - 4) == b"\0end"
    memory = memoryview(bytearray(os.urandom(PART_BYTES + 8192)))
    assert file.write(memory, [], [Block(0, crc32c(memory[:100]) ^ 1, 100)]) == 0
    pieces = [PageRun(8192, PART_BYTES + 4096, PART_BYTES - 4096), PageRun(0, 4096, 4096)]
    assert file.write(memory, pieces, [Block(0, crc32c(memory[:100]), 100)]) is None
    for piece in pieces:
        expected[piece.offset : piece.offset + piece.size] = memory[piece.start : piece.start + piece.size]
    memory[:] = bytes(len(memory))  # it is the caller's again
    with pytest.raises(OSError, match="on its way already"):
        file.write_small(memoryview(b"late"), 10)
    file.finish()
    assert kept.whole == expected
    assert len(kept.parts) == 3


def test_small_writes_take_memory_for_their_own_pages_only() -> None:
    """Each tensor may have an end of less than a page, and a file may be as large as the memory."""
    file = S3NewFile(S3Bucket("b", _Kept()), "key")
    file.allocate(8 << 30)
    before = _resident_bytes()
    for part in range((8 << 30) // PART_BYTES):
        file.write_small(memoryview(b"end"), part * PART_BYTES + 9_000)
    assert _resident_bytes() - before < 64 << 20
    assert file.pread(4, 3 * PART_BYTES + 9_000) == b"end\0"
    file.give_up()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_small_file_is_one_object() -> None:
    kept = _Kept()
    file = S3NewFile(S3Bucket("b", kept), "key")
    file.write_small(memoryview(b"content"), 0)
    file.finish()
    assert kept.whole == b"content"
    assert kept.parts == {}


def test_of_requests_side_by_side_none_begins_after_a_fault_and_none_is_left() -> None:
    """The error of the first of them in order is raised, though a later one fails sooner."""
    begun, ended, failed = set[int](), set[int](), threading.Event()

    def act(number: int) -> int:
        begun.add(number)
        if number == 3:
            failed.set()
            raise PermissionError("the fourth")
        failed.wait()
        if number == 1:
            raise TimeoutError("the second")
        time.sleep(0.05)
        ended.add(number)
        return number

    with pytest.raises(TimeoutError, match="the second"):
        in_parallel(act, range(20 * THREADS))
    assert begun == {*ended, 1, 3}
    assert len(begun) < 20 * THREADS
    assert in_parallel(lambda number: number, range(100)) == [*range(100)]
