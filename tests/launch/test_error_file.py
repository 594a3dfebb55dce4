"""What a dead rank left behind: torchrun's error files, hostile ones, and exits in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.rank_error import write_error
from resilio_hpc.launch.workers.output.error_file import MAX_BYTES, describe_exit, parse_error, read_error
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S


def test_an_error_that_torch_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    code = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def train():\n"
        "    raise RuntimeError('loss is NaN')\n"
        "train()\n"
    )
    environment = scrubbed(TORCHELASTIC_ERROR_FILE=path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    error, note = read_error(path)
    assert error is not None and note == ""
    assert error.message == "RuntimeError: loss is NaN"
    assert "in train" in error.traceback
    assert error.time == path.stat().st_mtime  # finer than the whole seconds that torch writes


def test_an_error_that_we_write_is_read_by_torch(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    try:
        raise ValueError("wrong shape (3, 4)")
    except ValueError as error:
        write_error(path, error)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "ValueError: wrong shape (3, 4)"  # type: ignore[index]
    assert failure.timestamp == pytest.approx(path.stat().st_mtime, abs=2)
    ours, _ = read_error(path)
    assert ours is not None and "raise ValueError" in ours.traceback
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]


def test_what_the_script_recorded_itself_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "the first"}')
    write_error(path, ValueError("the second"))
    error, _ = read_error(path)
    assert error is not None and error.message == "the first"


def test_writing_an_error_never_raises(tmp_path: Path) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    write_error(tmp_path / "no such directory" / "error.json", ValueError("x"))
    write_error(tmp_path / "error.json", Unprintable())
    assert read_error(tmp_path / "error.json")[0] is None


def test_time_stamps() -> None:
    def time_of(stamp: object, written: float = 1000.5) -> float:
        error = parse_error(
            json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": stamp}}}).encode(), written
        )
        assert error is not None
        return error.time

    assert time_of("1000") == 1000.5  # the same moment, told more finely
    assert time_of("500") == 500.0
    for bad in ("soon", None, [1], -5, 10**400, "9" * 4000, 1e999):
        assert time_of(bad) == 1000.5


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"message": 5}',
        b'{"message": {"message": {"message": "x"}}}',
        b'{"message": null}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"message": ' + b'{"message": ' * 50_000,
        b"9" * 10_000,
    ],
)
def test_a_hostile_or_torn_file_is_ignored_with_a_note(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    error, note = read_error(path)
    assert error is None and "ignored" in note


def test_files_that_are_not_plain_or_too_big_are_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "big").write_bytes(b" " * (MAX_BYTES + 1))
    for name in ("fifo", "link", "big", "."):
        error, note = read_error(tmp_path / name)
        assert error is None and "ignored" in note
    (tmp_path / "empty").touch()
    assert read_error(tmp_path / "empty") == (None, "")
    assert read_error(tmp_path / "missing") == (None, "")


def test_escapes_and_length_of_a_message_are_bounded() -> None:
    error = parse_error(json.dumps({"message": "a\x1b[2Jb\x00\ud800" + "x" * 100_000}).encode(), 1.0)
    assert error is not None
    assert error.message.startswith("a?[2Jb??")
    assert len(error.message) < 5000


@pytest.mark.parametrize(
    ("exit_code", "signal", "words"),
    [
        (0, None, "ended normally"),
        (1, None, "exit code 1"),
        (7, None, "failed, exit code 7"),
        (127, None, "was not found"),
        (137, None, "exit code 137: killed by SIGKILL (often the kernel's or Slurm's out-of-memory killer"),
        (139, None, "exit code 139: killed by SIGSEGV"),
        (None, 9, "killed by SIGKILL"),
        (None, 7, "/dev/shm is full"),
        (-11, None, "killed by SIGSEGV"),
        (None, 99, "killed by signal 99"),
        (255, None, "failed, exit code 255"),
        (None, None, "unknown"),
    ],
)
def test_exits_in_words(exit_code: int | None, signal: int | None, words: str) -> None:
    assert words in describe_exit(exit_code, signal)
